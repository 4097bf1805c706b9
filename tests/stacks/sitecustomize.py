"""Each Python process that a test starts, directly or not, tells its stacks when it is asked to (tests/watcher.py)."""

import os

if folder := os.environ.get("SHARDBOOK_TEST_STACKS"):
    import faulthandler
    import signal

    path = os.path.join(folder, str(os.getpid()))  # noqa: PTH118  # pathlib would be imported by each of them
    faulthandler.register(signal.SIGUSR2, open(path, "a"), all_threads=True)  # noqa: SIM115, PTH123
