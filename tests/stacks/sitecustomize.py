"""Each Python process that a test starts, directly or not, is counted (tests/budget.py), and tells its stacks when it
is asked to (tests/watcher.py)."""

import os

if tally := os.environ.get("SHARDBOOK_TEST_TALLY"):
    with open(tally, "a") as file:  # noqa: PTH123
        file.write("c")  # tests/budget.py counts them
if warm := os.environ.get("SHARDBOOK_TEST_WARM"):
    import sys

    sys.executable = warm  # what this process starts ranks with (tests/zygote.py)
if folder := os.environ.get("SHARDBOOK_TEST_STACKS"):
    import faulthandler
    import signal

    path = os.path.join(folder, str(os.getpid()))  # noqa: PTH118  # pathlib would be imported by each of them
    faulthandler.register(signal.SIGUSR2, open(path, "a"), all_threads=True)  # noqa: SIM115, PTH123
