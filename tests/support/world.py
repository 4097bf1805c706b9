"""Worlds of ranks for tests: functions run in N real processes over gloo, forked from a server that has imported torch
once (preloaded.py), so that a world of four costs about a second."""

import collections
import contextlib
import faulthandler
import functools
import io
import itertools
import json
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path

from budget import blocks_measured, count

UNCHANGED = ("train_rank", "run_cases")  # of a function that may have planted something no measurement is kept
STREAMS = "SHARDBOOK_TEST_STREAMS"  # set: each rank has a CUDA that remembers (streams.py) for its device
# Below the ports that the kernel hands out, so that nobody is given one between now and when rank 0 listens. Workers
# and sessions begin at different ones, and whatever another has claimed is passed over.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
claims: collections.deque[socket.socket] = collections.deque(maxlen=64)
PORTS = range(10_000, 32_000)
ports = itertools.cycle([*PORTS[(first := (4_001 * WORKER + os.getpid()) % len(PORTS)) :], *PORTS[:first]])


@functools.cache
def forks() -> multiprocessing.context.ForkServerContext:
    """What makes processes: forked from a server that has imported preloaded.py, which it finds by PYTHONPATH alone."""
    context, variables = multiprocessing.get_context("forkserver"), os.environ.copy()
    context.set_forkserver_preload(["preloaded"])
    paths = filter(None, [str(Path(__file__).parent), variables.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    forkserver.ensure_running()
    del os.environ["PYTHONPATH"]
    os.environ.update(variables)
    return context


def free_port() -> int:
    """A port that no other session of tests is given meanwhile: each claims it by a name that one process has at a
    time, and holds the last of them, since rank 0 listens only later."""
    for port in ports:
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, contextlib.suppress(OSError):
            claim.bind(f"\0shardbook-tests-{port}")
            probe.bind(("127.0.0.1", port))
            claims.append(claim)
            return port
    raise AssertionError


def run_world(size: int, fn, *args, environment: dict[str, str] | None = None) -> list:
    """`fn(*args)` on each of `size` ranks; results by rank. A rank that raises fails the test, with its traceback; how
    long it takes is the watcher's to judge."""
    port, pipes, processes = free_port(), [], []
    for rank in range(size):
        here, there = forks().Pipe()
        variables = variables_of(rank, size, port, environment)
        process = forks().Process(target=_rank, args=(variables, there, fn, args), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    results: dict[int, object] = {}
    errors = []
    try:
        while len(results) < size and not errors:
            for pipe in wait([pipe for rank, pipe in enumerate(pipes) if rank not in results]):
                rank = pipes.index(pipe)
                try:
                    failed, results[rank] = pipe.recv()
                except EOFError:
                    processes[rank].join(10)
                    failed, results[rank] = True, f"died, exit code {processes[rank].exitcode}"
                if failed:
                    errors.append(f"rank {rank}:\n{results[rank]}")
        # One that another rank has ended says nothing itself: that rank answers now.
        for rank in results.keys() ^ set(range(size)):
            if any("died" in error for error in errors) and pipes[rank].poll(2):
                with contextlib.suppress(EOFError):
                    results[rank] = pipes[rank].recv()[1]
        errors += [
            f"rank {rank} answered {said}" for rank, said in results.items() if errors and isinstance(said, tuple)
        ]
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            if len(results) < size or errors:
                process.kill()
            pipe.close()
        for process in processes:
            process.join(10)
    assert not errors, "\n".join(errors)
    return [results[rank] for rank in range(size)]


def variables_of(rank: int, size: int, port: int, environment: dict[str, str] | None = None) -> dict[str, str]:
    """What a launcher would set."""
    environment = environment or {}
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"LOCAL_RANK": str(rank % int(environment.get("LOCAL_WORLD_SIZE", size)))}
    return variables | {"OMP_NUM_THREADS": "1"} | environment


def start_ranks(size: int, words: list[str], said: Path, prepare=None):
    """Ranks that live and end as processes of their own, with nobody to end them when one fails; what each prints goes
    to `said`/<rank>. `prepare()` is called in each before it trains."""
    port = free_port()
    processes = []
    for rank in range(size):
        given = (variables_of(rank, size, port), words, said / str(rank), prepare)
        processes.append(forks().Process(target=_whole_rank, args=given, daemon=True))
        processes[-1].start()
    return processes


def _whole_rank(variables: dict[str, str], words: list[str], said: Path, prepare) -> None:
    import torch

    from shardbook.ranks.exits import exit_rank
    from shardbook.train import main

    os.environ.update(variables)
    torch.set_num_threads(1)  # OMP_NUM_THREADS was read before the fork
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if prepare:
        prepare()
    exit_rank(main(words))


def _rank(variables: dict[str, str], pipe: Connection, fn, args) -> None:
    import torch

    rank = int(variables["RANK"])
    assert "preloaded" in sys.modules  # the server leaves out in silence what it cannot import
    faulthandler.enable()  # where native code ends a rank: what each of its threads did
    os.environ.update(variables)
    torch.set_num_threads(1)
    call = fn
    if STREAMS in os.environ:
        from cuda_stand_in import on_cuda

        call = functools.partial(on_cuda, fn)
    try:
        if rank == 0:
            know_blocks()
        known = blocks_measured()
        pipe.send((False, call(*args)))
        count("b", (blocks_measured() - known) * (rank == 0))  # the others are told
        if rank == 0 and fn.__name__ in UNCHANGED:
            keep_blocks()
    except BaseException:
        pipe.send((True, traceback.format_exc()))
    # Rank 0 keeps the store, which a late rank still needs. Others end at once: who waits for one of them must see it.
    if rank == 0:
        with contextlib.suppress(EOFError):
            pipe.recv()


def know_blocks() -> None:
    """Adds what earlier worlds of this session measured of blocks, a third of a short run; rank 0 tells the others."""
    from shardbook.plan.measure_blocks import KNOWN_BLOCKS

    with contextlib.suppress(FileNotFoundError):
        for own, earlier in zip(KNOWN_BLOCKS, pickle.loads(measured().read_bytes()), strict=True):
            own.update(earlier)


def keep_blocks() -> None:
    from shardbook.plan.measure_blocks import KNOWN_BLOCKS

    part = measured().with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(KNOWN_BLOCKS))
    part.replace(measured())


def measured() -> Path:
    return Path(os.environ["HF_HOME"]) / "measured-blocks"


def train_rank(words: list[str]) -> tuple[int, str, str]:
    """One rank of `python -m shardbook.train`: exit code, standard output, standard error."""
    from shardbook.train import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def run_train(
    size: int, recipe: Path, name: str, *words: str, code: int = 0, environment: dict[str, str] | None = None
) -> Path:
    """Train `recipe` on `size` ranks as run `name`; all ranks must leave with `code`. Returns the run directory."""
    results = run_world(size, train_rank, [str(recipe), f"run.name={name}", *words], environment=environment)
    assert [result[0] for result in results] == [code] * size, results
    return recipe.parent / name


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [row["train/loss"] for row in metrics(run) if "train/loss" in row]
