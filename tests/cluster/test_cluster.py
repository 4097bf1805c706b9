"""Two nodes of two ranks each, with a network of their own between them: every launcher computes what one node of four
ranks does, a node that disappears or is preempted stops both, and the same commands continue bitwise."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nodes import HOSTS, build_link, on_node, pids_on, remove_link, set_link, why_not
from world import losses

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
STEPS, LOST_SECONDS = 40, 3
WORDS = (
    *("parallel.stage=hsdp", "parallel.dp_replicate_size=2", "parallel.dp_shard_size=2"),
    *(f"train.steps={STEPS}", "train.save_steps=5", "train.export=false", f"run.lost_seconds={LOST_SECONDS}"),
)
LAUNCHERS = ("accelerate", "torchrun-static", "torchrun-c10d", "shardbook")
PORT = 29531


@pytest.fixture(scope="module", autouse=True)
def link():
    if why := why_not():  # not a skip: all of them skipped would look like a pass
        pytest.exit(f"test-cluster needs root, ip and tc: {why}", returncode=2)
    build_link()
    yield
    for node in (0, 1):
        kill(node)
    remove_link()


@pytest.fixture(scope="module")
def expected(recipe):
    """The losses of one node with four ranks, of the same mesh and undisturbed."""
    command = [BIN / "shardbook", "train", recipe, "run.name=one-node", *WORDS, "--nproc", "4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    found = losses(recipe.parent / "one-node")
    assert len(found) == STEPS
    return found


def command_of(launcher: str, node: int, words: list[str]) -> list[str]:
    match launcher:
        case "accelerate":
            file = ROOT / "launch/accelerate/multi-node.yaml"
            place = ("--machine_rank", str(node), "--main_process_ip", HOSTS[0], "--main_process_port", str(PORT))
            return [
                f"{BIN}/accelerate",
                "launch",
                f"--config_file={file}",
                *place,
                "--num_processes=4",
                "-m",
                "shardbook.train",
                *words,
            ]
        case "shardbook":
            place = ("--nodes", "2", "--node-rank", str(node), "--head", f"{HOSTS[0]}:{PORT}", "--nproc", "2")
            return [f"{BIN}/shardbook", "train", *words, *place]
    ranked = [f"NODE_RANK={node}"] if launcher == "torchrun-static" else []
    variables = ["NODES=2", f"HEAD={HOSTS[0]}:{PORT}", "NPROC=2", f"PYTHON={sys.executable}", *ranked]
    return ["env", *variables, f"{ROOT}/launch/torchrun.sh", *words]


class Node:
    """One node's launcher, and what it and its ranks have said."""

    def __init__(self, launcher: str, node: int, words: list[str], folder: Path):
        self.path = folder / f"said-{node}"
        with self.path.open("w") as file:
            command = on_node(node, *command_of(launcher, node, words))
            self.process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder)

    def said(self) -> str:
        return self.path.read_text()


def start(launcher: str, recipe: Path, folder: Path, name: str, *extra: str) -> list[Node]:
    return [Node(launcher, node, [str(recipe), f"run.name={name}", *WORDS, *extra], folder) for node in (0, 1)]


def wait_for(nodes: list[Node], seconds: float = 200) -> list[int]:
    deadline = time.monotonic() + seconds
    for node in nodes:
        try:
            node.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pytest.fail("still running:\n" + "\n".join(node.said()[-3000:] for node in nodes))
    return [node.process.returncode for node in nodes]


def wait_for_step(nodes: list[Node], step: int) -> None:
    deadline = time.monotonic() + 120
    while not re.search(rf"^step {step}/", nodes[0].said() + nodes[1].said(), re.M):
        assert time.monotonic() < deadline and not any(node.process.poll() for node in nodes), nodes[0].said()
        time.sleep(0.02)


def kill(node: int) -> None:
    for pid in pids_on(node):
        os.kill(pid, signal.SIGKILL)
    while pids_on(node):
        time.sleep(0.05)


def finishes(launcher, recipe, folder, name, expected) -> None:
    nodes = start(launcher, recipe, folder, name)
    assert wait_for(nodes) == [0, 0], nodes[0].said() + nodes[1].said()
    assert losses(recipe.parent / name) == expected


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_nodes_compute_what_one_does(launcher, recipe, tmp_path, expected):
    finishes(launcher, recipe, tmp_path, launcher, expected)


@pytest.mark.parametrize("launcher, gone", [("shardbook", 1), ("shardbook", 0), ("torchrun-static", 1)])
def test_a_node_that_disappears(launcher, gone, recipe, tmp_path, expected):
    name = f"gone-{gone}-{launcher}"
    nodes = start(launcher, recipe, tmp_path, name)
    try:
        wait_for_step(nodes, 12)
        began = time.monotonic()
        set_link(gone, up=False)
        # killed when the other has had the time to find out: a dead process closes its connections, a dead node not
        codes = wait_for(nodes[1 - gone : 2 - gone], seconds=60)
        took = time.monotonic() - began
        kill(gone)
    finally:
        set_link(gone, up=True)
    said = nodes[1 - gone].said()
    print(f"{name}: ended after {took:.1f} s")
    assert codes == [1] and LOST_SECONDS <= took < LOST_SECONDS + 10, (took, said)
    who = f"ranks 2, 3 (host {HOSTS[1]}) have" if gone else f"rank 0 (host {HOSTS[0]}) has"
    reason = f"shardbook: run failed: {who} not been heard of for {LOST_SECONDS} s; run the same command again"
    assert reason in said.splitlines(), said
    assert "Traceback" not in said.split(reason)[0]
    nodes[gone].process.wait()
    finishes(launcher, recipe, tmp_path, name, expected)


def rank_on(node: int, rank: int) -> int:
    """The pid of a rank."""
    for pid in pids_on(node):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"shardbook.train" in Path(f"/proc/{pid}/cmdline").read_bytes() and f"RANK={rank}".encode() in variables:
            return pid
    raise AssertionError(f"no rank {rank} on node {node}")


@pytest.mark.parametrize(
    "launcher, signum, to_rank",
    [
        ("torchrun-static", signal.SIGTERM, False),
        ("torchrun-c10d", signal.SIGUSR1, False),
        ("torchrun-static", signal.SIGUSR1, True),
        ("shardbook", signal.SIGTERM, False),
    ],
)
def test_preempted_on_one_node(launcher, signum, to_rank, recipe, tmp_path, expected):
    name = f"preempted-{launcher}-{signum}-{to_rank}"
    nodes = start(launcher, recipe, tmp_path, name)
    wait_for_step(nodes, 12)
    os.kill(rank_on(1, 2) if to_rank else nodes[1].process.pid, signum)
    assert wait_for(nodes) == [75, 75], nodes[0].said() + nodes[1].said()
    assert 12 <= len(losses(recipe.parent / name)) < STEPS
    finishes(launcher, recipe, tmp_path, name, expected)


def refused(nodes: list[Node], said: str, seconds: float) -> None:
    began = time.monotonic()
    codes = wait_for(nodes, seconds)
    print(f"refused after {time.monotonic() - began:.1f} s")
    for code, node in zip(codes, nodes, strict=True):
        last = node.said().strip().splitlines()[-1]
        assert code == 2 and re.match(f"shardbook: {said}", last) and "Traceback" not in node.said(), node.said()


def test_the_head_is_down(recipe, tmp_path):
    set_link(0, up=False)
    try:
        node = Node("shardbook", 1, [str(recipe), "run.name=refused", *WORDS], tmp_path)
        refused([node], rf"{HOSTS[0]}:{PORT}: rank 2 on {HOSTS[1]} did not reach rank 0 there in \d+ s \(", 60)
    finally:
        set_link(0, up=True)


def test_the_heads_port_is_taken(recipe, tmp_path):
    listen = f"import socket, time; s = socket.create_server(('', {PORT})); print('up', flush=True); time.sleep(120)"
    command = on_node(0, sys.executable, "-c", listen)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as taken:
        assert taken.stdout.readline() == "up\n"
        node = Node("shardbook", 0, [str(recipe), "run.name=refused", *WORDS], tmp_path)
        refused([node], f"{HOSTS[0]}:{PORT}: the port is taken on {HOSTS[0]}, where rank 0 should listen", 60)
        taken.kill()


def test_a_node_does_not_come(recipe, tmp_path):
    shorter = "import sys, shardbook.ranks.rendezvous as join; join.JOIN_SECONDS = 4; from shardbook.train import main"
    variables = ("RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", f"MASTER_ADDR={HOSTS[0]}")
    program = (sys.executable, "-c", f"{shorter}; sys.exit(main())", str(recipe), "run.name=refused")
    command = on_node(0, "env", *variables, f"MASTER_PORT={PORT}", *program)
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    said = f"shardbook: rank 1 of 2 did not come to {HOSTS[0]}:{PORT} in 4 s; start the run on every node, with this "
    assert result.stderr.splitlines()[-1] == said + "address"  # torch may warn of a client without a name


def test_nodes_with_unlike_recipes(recipe, tmp_path):
    words = [str(recipe), "run.name=refused", *WORDS]
    nodes = [
        Node("shardbook", 0, words, tmp_path),
        Node("shardbook", 1, [*words, "optim.learning_rate=1.0"], tmp_path),
    ]
    said = "rank 2 is not started like rank 0: optim.learning_rate is 1.0 there, 0.003 here"
    refused(nodes, said, 90)
    assert not (recipe.parent / "refused").exists()
