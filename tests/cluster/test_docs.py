"""Every command of docs/cluster.md, with smaller numbers: a tiny recipe, two nodes of one rank on this machine."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from world import losses

from shardbook.ranks.launch import free_port

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
COMMANDS = re.findall(r"^```\n(.+?)\n```$", (ROOT / "docs" / "cluster.md").read_text(), re.M | re.S)
SLURM = [command for command in COMMANDS if command.startswith("sbatch")]  # test_slurm.py has the cluster for them


def smaller(command: str, recipe: Path, made: Path) -> str:
    """The page's command for this machine. `made`: a file that stands for an installed .venv."""
    for pattern, word in (
        (r"RECIPE=\S+", f"RECIPE={recipe}"),
        (r"recipes/\S+\.toml", str(recipe)),
        (r"/shared/runs", str(recipe.parent)),
        (r"(HEAD=|--main_process_ip )node-0", r"\g<1>127.0.0.1"),
        (r"NODES=8|--num_machines 8", lambda found: found[0].replace("8", "2")),
        (r"--num_processes 64", "--num_processes 2"),
        (r"^make (\w+)", rf"make \1 BIN={BIN} RUN={made}"),
        (r"^accelerate", f"{BIN}/accelerate"),
    ):
        command = re.sub(pattern, word, command)
    return command


def test_the_page_has_the_commands_that_are_tested():
    kinds = [shlex.split(command)[0] for command in COMMANDS if command not in SLURM]
    assert kinds == ["make", "make", "make", "NODES=8", "accelerate"] and len(SLURM) == 2


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in SLURM])
def test_a_command_of_the_page(command, recipe, tmp_path):
    (tmp_path / "made").touch()
    port, processes = free_port(), []
    name = f"docs-{COMMANDS.index(command)}"
    several = "node-0" in command
    for node in (0, 1) if several else (0,):
        line = smaller(command, recipe, tmp_path / "made").replace("run.name=mine", f"run.name={name}")
        line = line.replace("NODE_RANK=0", f"NODE_RANK={node}").replace("--machine_rank 0", f"--machine_rank {node}")
        line = line.replace("HEAD=127.0.0.1", f"HEAD=127.0.0.1:{port}")
        line = line.replace("--main_process_ip", f"--main_process_port {port} --main_process_ip")
        line += " NPROC=1" * (several and line.startswith("make"))
        if not several:
            line += f' ARGS="run.name={name} run.dir={recipe.parent}"'
        given = {"NPROC": "1", "PYTHON": sys.executable} if line.startswith("NODES=") else {}
        words = " ".join(f"{key}={value}" for key, value in given.items())
        processes.append(
            subprocess.Popen(
                ["sh", "-c", f"{words} {line}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
        time.sleep(0.1)
    said = [process.communicate(timeout=240)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    runs = (
        [recipe.parent / name / part for part in ("ddp", "zero3")] if "compare" in command else [recipe.parent / name]
    )
    first, *others = [losses(run) for run in runs]
    assert len(first) == 5 and all(other == first for other in others)
