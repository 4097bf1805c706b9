"""train.profile_steps leaves a trace of those steps and of no others, and changes no number."""

import gzip
import json
import os
import time

import pytest
from world import losses, run_train, run_world, train_rank

from shardbook.recipe import RecipeError, load_recipe


def test_a_trace_of_two_steps(recipe):
    plain = run_train(1, recipe, "plain", "train.steps=4")
    run = run_train(1, recipe, "profiled", "train.steps=4", "train.profile_steps=[2,3]")
    assert losses(run) == losses(plain)
    assert [path.name for path in (run / "profile").iterdir()] == ["rank-0.json.gz"]
    with gzip.open(run / "profile" / "rank-0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    # AdamW runs once a step
    assert sum(event.get("name", "").startswith("Optimizer.step#AdamW") for event in events) == 2
    assert any(event.get("name") == "aten::mm" for event in events)
    assert not (plain / "profile").exists()


def test_a_run_that_ends_inside_keeps_its_trace(recipe):
    run = run_train(1, recipe, "short", "train.steps=2", "train.profile_steps=[2,2]")
    assert (run / "profile" / "rank-0.json.gz").is_file()


def test_each_rank_prints_where_its_profile_is(recipe):
    words = ["run.name=printed", "train.steps=2", "train.profile_steps=[1,1]", "train.export=false"]
    folder = recipe.parent / "printed" / "profile"
    for rank, (code, out, err) in enumerate(run_world(2, train_rank, [str(recipe), *words])):
        assert code == 0, err
        lines = [line for line in out.splitlines() if line.startswith("profile ")]
        assert lines == [f"profile  {folder}/rank-{rank}.json.gz, for ui.perfetto.dev"]
        assert (folder / f"rank-{rank}.json.gz").is_file()


@pytest.mark.parametrize("steps", ["[5]", "[3,2]", "[0,1]", "[1,2,3]", "[4,6]"])
def test_steps_that_never_come_are_refused(recipe, steps):
    with pytest.raises(RecipeError, match=r"profile_steps = .*: must be two steps, .* from 1, at most steps = 5"):
        load_recipe(recipe, ["train.steps=5", f"train.profile_steps={steps}"])


def write_late(folder, fails):
    """Rank 1's file takes a second. Whether it is there when a rank begins its next step; or when one has failed."""
    import torch.distributed as dist

    from shardbook.run.profile import Profile

    dist.init_process_group("gloo")
    dist.barrier()
    rank = int(os.environ["RANK"])
    write = Profile._write

    def late(profile):
        time.sleep(rank)
        write(profile)

    Profile._write = late
    if fails and rank:
        return True  # rank 0 alone fails: it waits for nobody
    try:
        with Profile(folder, [1, 1], rank) as profile:
            profile.advance(1)
            if fails:
                raise OSError
            profile.advance(2)
            return (folder / "profile" / "rank-1.json.gz").exists()
    except OSError:
        return (folder / "profile" / "rank-0.json.gz").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_no_rank_waits_on_the_device_for_another_ones_file(fails, tmp_path):
    """NCCL's limit is a little more than run.hang_seconds, and a disk may take longer."""
    assert run_world(2, write_late, tmp_path, fails) == [True, True]
