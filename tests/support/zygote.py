"""The zygote: ranks that a launcher starts are forked from a process that has imported all they need.

Invariant: a launcher does not know it. To processes that tests start it is their `sys.executable` (stacks/): a Python
that becomes the real one, but for `-m shardbook.train`. Then the zygote forks the rank with the same words, folder,
environment and streams; signals are passed on, exit codes passed back, and who kills the one kills the other.
"""

import contextlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

from watcher import KEPT, stat_of
from world import forks

WARM = "SHARDBOOK_TEST_WARM"  # the Python that launchers start ranks with; unset: each rank is a fresh process
RANK = ["-m", "shardbook.train"]
# -S and -E: the client reads no site, so that it takes 20 ms.
CLIENT = """#!{python} -SE
import os, sys
if sys.argv[1:3] != {rank}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import json, signal, socket, struct
PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
said = json.dumps([os.getpid(), os.getcwd(), sys.argv[3:], dict(os.environ)]).encode()
socket.send_fds(server, [struct.pack("!I", len(said))], [0, 1, 2])
server.sendall(said)
(rank,) = struct.unpack("!i", server.recv(4))

def pass_on(signum, frame):
    try:
        os.kill(rank, signum)
    except ProcessLookupError:
        pass  # its code is on its way

for signum in PASSED:
    signal.signal(signum, pass_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
(code,) = struct.unpack("!i", server.recv(4))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def write_client(folder: Path) -> Path:
    """Writes the Python that asks the zygote which listens at `folder`/socket."""
    client = folder / "python3"
    client.write_text(CLIENT.format(python=sys.executable, rank=RANK, path=str(folder / "socket")))
    client.chmod(0o755)
    return client


@contextlib.contextmanager
def started() -> Iterator[str]:
    """Has a zygote, which is a fork of the server of ranks; gives what WARM must be for launchers to use it."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))  # a short path: a socket's has at most 107 bytes
    client, (reader, writer) = write_client(folder), forks().Pipe()
    zygote = forks().Process(target=serve, args=(folder, writer), daemon=True)
    zygote.start()
    writer.close()  # else nobody would see that it ended before it listened
    KEPT.add(zygote.pid)
    try:
        assert reader.recv() == zygote.pid
        yield str(client)
    finally:
        zygote.kill()
        zygote.join()
        KEPT.discard(zygote.pid)
        shutil.rmtree(folder)


def serve(folder: Path, ready) -> None:
    """Forks ranks for clients, until this process is killed. `ready`: a pipe that is told when it listens."""
    wakes, woken = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    ready.send(os.getpid())
    clients: dict[socket.socket, int] = {}  # the rank of each
    waits = selectors.DefaultSelector()
    for each in (listener, wakes):
        waits.register(each, selectors.EVENT_READ)
    while True:
        for key, _ in waits.select():
            if key.fileobj is listener:
                client, _ = listener.accept()
                if rank := _fork(client, [listener, wakes, woken, *clients]):
                    clients[client] = rank
                    waits.register(client, selectors.EVENT_READ)
                else:
                    client.close()
            elif key.fileobj is wakes:
                with contextlib.suppress(BlockingIOError):
                    wakes.recv(4096)
            elif key.fileobj in clients:  # a client says nothing more: it was killed
                os.kill(clients[key.fileobj], signal.SIGKILL)
                waits.unregister(key.fileobj)
        _reap(clients, waits)


def _reap(clients: dict[socket.socket, int], waits: selectors.BaseSelector) -> None:
    """Tells each client whose rank has ended how it has."""
    while clients:
        rank, status = os.waitpid(-1, os.WNOHANG)
        if not rank:
            return
        client = next(client for client, own in clients.items() if own == rank)
        with contextlib.suppress(OSError):
            client.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
        with contextlib.suppress(KeyError):
            waits.unregister(client)
        client.close()
        del clients[client]


def _fork(client: socket.socket, own: list[socket.socket]) -> int:
    """Forks the rank that a client asks for, and tells the client its pid. Returns it; 0: the client has gone."""
    head, streams, _, _ = socket.recv_fds(client, 4, 3)
    said = b""
    with contextlib.suppress(ConnectionError):
        while len(head) == 4 and len(said) < struct.unpack("!I", head)[0] and (part := client.recv(1 << 20)):
            said += part
    is_whole = len(head) == 4 and len(said) == struct.unpack("!I", head)[0]
    rank = os.fork() if is_whole else None
    if rank == 0:
        try:
            for each in (client, *own):
                each.close()
            _become(streams, *json.loads(said))
        finally:
            os._exit(1)
    for stream in streams:
        os.close(stream)
    if rank is None:
        return 0
    with contextlib.suppress(OSError):  # it was killed meanwhile, which its end of the socket will say
        client.sendall(struct.pack("!i", rank))
    return rank


def _become(streams: list[int], client: int, folder: str, words: list[str], environment: dict[str, str]) -> None:
    """Makes this fork what `python -m shardbook.train words` would be as a child of the client's parent."""
    import torch

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    # what started the rank is the client's parent: a client whose parent was killed has another
    os.getppid = lambda: int(stat_of(client)[1])
    sys.argv = ["", *words]
    sys.path.insert(0, folder)
    sys.executable = environment[WARM]
    warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
    code: object = 0
    try:
        runpy.run_module(RANK[1], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
