"""Other launchers: what their variables say of how many processes they started. Imports no torch.

Invariant: one command that a cluster starts several times joins its runs or is refused; never does each train alone.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardbook.recipe import RecipeError


class Launcher(NamedTuple):
    """The variables by which a program numbers the processes that it starts, and what it is in words."""

    size: str
    rank: str
    program: str


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
