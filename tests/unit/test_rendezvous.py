"""What a launcher's variables mean, and what is wrong with them."""

import pytest

from shardbook.ranks.join import Rendezvous, read_rendezvous
from shardbook.recipe import RecipeError

GOOD = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
GOOD |= {"MASTER_PORT": "29500"}


def test_what_a_launcher_sets():
    assert read_rendezvous(GOOD) == Rendezvous(3, 4, 1, 2, "a", 29500)
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert read_rendezvous(GOOD | torchrun) == Rendezvous(3, 4, 1, 2, "a", 29500, hosted=True, attempt=2)
    assert read_rendezvous({}) == read_rendezvous({"SLURM_NTASKS": "1"}) == Rendezvous()


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"RANK": "first"}, "RANK = 'first': must be a whole number"),
        ({"RANK": "-1"}, "RANK = '-1': must be a whole number"),
        ({"RANK": "4"}, "RANK = 4: must be below WORLD_SIZE = 4"),
        ({"WORLD_SIZE": ""}, "the launcher set RANK but not WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE = 3: must divide WORLD_SIZE = 4"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE = 0: must divide WORLD_SIZE = 4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK = 2: must be below LOCAL_WORLD_SIZE = 2"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT = 70000: must be from 1 to 65535"),
        ({"RANK": None, "SLURM_NTASKS": "8"}, "SLURM_NTASKS = 8 and no RANK: srun alone makes no run"),
        ({"RANK": None, "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE = 2 and no RANK: mpirun alone"),
    ],
)
def test_wrong_variables(wrong, said):
    variables = {name: text for name, text in (GOOD | wrong).items() if text is not None}
    with pytest.raises(RecipeError) as raised:
        read_rendezvous(variables)
    line = str(raised.value)
    assert line.startswith(said) and "; start with shardbook train, torchrun" in line and "\n" not in line
