"""Each Python process that a test starts, directly or not, is counted (budget.py), and tells its stacks when it
is asked to (watcher.py)."""

import os
import sys

tally = os.environ.get("SHARDBOOK_TEST_TALLY")
# the server of ranks and its tracker are there once for each worker, of which there are as many as somebody likes
if tally and not any("multiprocessing." in word for word in sys.orig_argv):
    with open(tally, "a") as file:  # noqa: PTH123
        file.write("c")
if warm := os.environ.get("SHARDBOOK_TEST_WARM"):
    sys.executable = warm  # what this process starts ranks with (tests/support/zygote.py)
if folder := os.environ.get("SHARDBOOK_TEST_STACKS"):
    import faulthandler
    import signal

    path = os.path.join(folder, str(os.getpid()))  # noqa: PTH118  # pathlib would be imported by each of them
    faulthandler.register(signal.SIGUSR2, open(path, "a"), all_threads=True)  # noqa: SIM115, PTH123
