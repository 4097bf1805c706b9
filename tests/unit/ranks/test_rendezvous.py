"""What a launcher's variables mean, and what is wrong with them."""

import json
import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from shardbook.ranks import rendezvous
from shardbook.ranks.launch import launch_ranks
from shardbook.ranks.launchers import Rendezvous, check_alone, read_rendezvous
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


@pytest.mark.parametrize(
    "variables, words",
    [
        (
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
            "WORLD_SIZE = 2 and RANK = 1, as torchrun, accelerate or a PyTorchJob sets them: 2 processes of this "
            "command would each run alone. One on each of 2 machines makes a run with --nodes 2 --node-rank 1 --head "
            "job-master-0:23456; one for each rank with",
        ),
        (  # as the training operator sets them for 2 pods of 8 ranks
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "WORLD_SIZE": "16", "RANK": "0", "PET_RDZV_ENDPOINT": "a:29400"},
            "PET_NNODES = 2 and PET_NODE_RANK = 0, as a PyTorchJob or TrainJob sets them: 2 proc.* --head a:29400;",
        ),
        (
            {"PET_NNODES": "1:4"},
            "PET_NNODES = 1:4, as .*: 4 processes .* --node-rank this one's number from 0 --head the",
        ),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, "SLURM_STEP_NUM_TASKS = 4 and SLURM_PROCID = 3, as srun"),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0"}, ".* as mpirun sets them: 8 processes"),
        ({"PMI_SIZE": "8"}, "PMI_SIZE = 8, as mpiexec"),
        ({"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1"}, ".* as jsrun"),
    ],
)
def test_a_command_that_a_cluster_starts_several_times_trains_not_alone(variables, words, monkeypatch):
    with pytest.raises(RecipeError, match=words):
        check_alone(variables, "shardbook.train")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=words):
        launch_ranks(1, ["no-recipe.toml"])
    with pytest.raises(RecipeError, match="alone makes no run of its processes"):
        read_rendezvous({name: value for name, value in variables.items() if name != "RANK"})


@pytest.mark.parametrize(
    "variables", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"PET_NNODES": "1:1"}, {"SLURM_NTASKS": "8"}]
)
def test_a_command_that_is_started_once_is_alone(variables):
    check_alone(variables, "shardbook.train")


def member(rank):
    return json.dumps({"rank": rank, "world_size": 2, "host": "a", "pid": rank, "address": "127.0.0.1"})


@pytest.fixture
def store():
    """Of two ranks that have a number: the second one has written of itself, the first one not yet."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.add("joined", 2)
    store.set("joined/2", member(1))
    return store


def test_a_rank_that_has_a_number_and_has_not_written_is_waited_for(store):
    threading.Timer(0.3, lambda: store.set("joined/1", member(0))).start()
    rendezvous._await_members(store, Rendezvous(1, 2, 1, 2), [], False)


def test_one_that_comes_when_the_others_gave_up_gives_up_too(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.2)
    with pytest.raises(RecipeError, match="ranks 0, 1 of 2 did not come to"):
        rendezvous._await_members(store, Rendezvous(1, 2, 1, 2), [], False)
    store.set("joined/1", member(0))
    with pytest.raises(RecipeError, match=r"rank 0 came to .* when the others had given up; start the run"):
        rendezvous._await_members(store, Rendezvous(0, 2, 0, 2), [], False)
