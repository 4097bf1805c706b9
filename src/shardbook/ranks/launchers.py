"""Launchers: what the variables of each say of this process's rank, and of how many processes it started.

Invariant: one command that a cluster starts several times joins its runs or is refused; never does each train alone.
Imports no torch.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardbook.recipe import RecipeError


class Launcher(NamedTuple):
    """The variables by which a program numbers the processes that it starts, and what it is in words."""

    size: str
    rank: str
    program: str


START = "start with shardbook train, torchrun, accelerate launch, or srun through launch/slurm.sbatch"
MACHINES = "PET_NNODES"
TRAIN = "shardbook.train"
# In the order in which they are asked: WORLD_SIZE may count ranks, where PET_NNODES counts machines.
SEVERAL = (
    Launcher(MACHINES, "PET_NODE_RANK", "a PyTorchJob or TrainJob"),
    Launcher("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),
    Launcher("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"),
    Launcher("PMI_SIZE", "PMI_RANK", "mpiexec"),
    Launcher("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "mpirun_rsh"),
    Launcher("PALS_SIZE", "PALS_RANKID", "mpiexec of PALS"),
    Launcher("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun"),
    Launcher("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "flux run"),
    Launcher("WORLD_SIZE", "RANK", "torchrun, accelerate or a PyTorchJob"),
)


# of a whole job, whose script may start a launcher once; a rank without a launcher is not sure to be alone
JOB = Launcher("SLURM_NTASKS", "SLURM_PROCID", "srun")


def find_several(variables: Mapping[str, str], launchers: Iterable[Launcher] = SEVERAL) -> tuple[Launcher, int] | None:
    """Returns the launcher that started several processes, and their number; None where none did. A range, as torchrun
    takes it for an elastic run ("1:4"), is its most. One machine by its count is one, whatever WORLD_SIZE says."""
    for launcher in launchers:
        numbers = re.findall(r"\d+", variables.get(launcher.size, ""))
        if numbers and int(numbers[-1]) > 1:
            return launcher, int(numbers[-1])
        if numbers and launcher.size == MACHINES:
            return None
    return None


@dataclass(frozen=True)
class Rendezvous:
    """This rank among all, and the store's address. `hosted`: the launcher's agent hosts the store, not rank 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    ranks_per_node: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    hosted: bool = False
    attempt: int = 0  # torchrun starts its ranks again on the same store

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def read_rendezvous(variables: Mapping[str, str]) -> Rendezvous:
    """Returns the rendezvous of a launcher's `variables`, a world of one without a launcher. Raises RecipeError."""
    if "RANK" not in variables:
        if several := find_several(variables, (JOB, *SEVERAL)):
            name, _, program = several[0]
            alone = f"{program} alone makes no run of its processes"
            raise RecipeError(f"{name} = {variables[name]} and no RANK: {alone}; {START}")
        return Rendezvous()
    absent = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if absent:
        raise RecipeError(f"the launcher set RANK but not {', '.join(absent)}; {START}")

    def number(name: str, default: str = "") -> int:
        text = variables.get(name) or default
        if not (text.isascii() and text.isdigit()):
            raise RecipeError(f"{name} = {text!r}: must be a whole number; {START}")
        return int(text)

    rank, world = number("RANK"), number("WORLD_SIZE")
    local_rank, ranks_per_node = number("LOCAL_RANK", "0"), number("LOCAL_WORLD_SIZE", str(world))
    port, wanted = number("MASTER_PORT"), "the same number of ranks a node"
    uneven = ranks_per_node < 1 or world % ranks_per_node
    for wrong, message in (
        (rank >= world, f"RANK = {rank}: must be below WORLD_SIZE = {world}"),
        (uneven, f"LOCAL_WORLD_SIZE = {ranks_per_node}: must divide WORLD_SIZE = {world}: {wanted}"),
        (local_rank >= ranks_per_node, f"LOCAL_RANK = {local_rank}: must be below LOCAL_WORLD_SIZE = {ranks_per_node}"),
        (not 0 < port < 2**16, f"MASTER_PORT = {port}: must be from 1 to 65535"),
    ):
        if wrong:
            raise RecipeError(f"{message}; {START}")
    hosted = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = number("TORCHELASTIC_RESTART_COUNT", "0")
    return Rendezvous(rank, world, local_rank, ranks_per_node, variables["MASTER_ADDR"], port, hosted, attempt)


def check_alone(variables: Mapping[str, str], module: str) -> None:
    """Raises RecipeError where a command that starts the ranks of one machine, of `module`, was itself started several
    times."""
    if not (several := find_several(variables)):
        return
    launcher, count = several
    rank = variables.get(launcher.rank, "")
    set_here = f"{launcher.size} = {variables[launcher.size]}" + f" and {launcher.rank} = {rank}" * bool(rank)
    join = f"One for each rank makes them one with python -m {module}"
    if module == TRAIN:
        node = rank or "this one's number from 0"
        head = _head(variables) or "the first machine"
        join = (
            f"One on each of {count} machines makes a run with --nodes {count} --node-rank {node} --head {head}; "
            + (f"one for each rank with python -m {module}")
        )
    also = [each.size for each in SEVERAL if find_several(variables, (each,))]
    raise RecipeError(
        f"{set_here}, as {launcher.program} sets them: {count} processes of this command would each run alone. {join}; "
        f"where it is started once, unset {', '.join(also)}"
    )


def _head(variables: Mapping[str, str]) -> str:
    if endpoint := variables.get("PET_RDZV_ENDPOINT"):
        return endpoint
    for prefix in ("PET_", ""):
        if host := variables.get(f"{prefix}MASTER_ADDR"):
            return ":".join(filter(None, (host, variables.get(f"{prefix}MASTER_PORT", ""))))
    return ""
