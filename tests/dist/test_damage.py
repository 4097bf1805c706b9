"""Damage that one rank meets is every rank's verdict; a run goes back to the newest whole checkpoint by itself, and
never begins again in silence; numbers that are not finite are not published."""

import shutil
from pathlib import Path

import pytest
from planted import replace
from test_checkpoint_save import save, start, state_of
from world import losses, run_train, run_world, train_rank

from shardbook.run.checkpoint.format import list_checkpoints, read_stored, verify

SAVING = ("train.steps=4", "train.save_steps=2")


def flip(file: Path, at: float) -> None:
    """Flips one bit, at this share of a file."""
    data = bytearray(file.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    file.write_bytes(data)


@pytest.fixture(scope="module")
def straight(recipe):
    return run_train(2, recipe, "straight", *SAVING)


def damaged_run(straight, name, *steps):
    run = straight.parent / name
    shutil.copytree(straight, run, ignore=shutil.ignore_patterns("export", "run.json"))
    for step in steps:
        flip(run / "checkpoints" / f"step-{step:06d}" / "rank-1.bin", 0.5)
    return run


def test_a_run_goes_back_to_the_newest_whole_checkpoint(recipe, straight):
    run = damaged_run(straight, "back", 4)
    first, second = run_world(2, train_rank, [str(recipe), "run.name=back", *SAVING])
    assert (first[0], second[0]) == (0, 0), (first, second)
    said = [line for line in first[1].splitlines() if line.startswith("warning")]
    begins = f"warning  checkpoint {run}/checkpoints/step-000004: damaged (rank-1.bin: bytes "
    assert len(said) == 1 and said[0].startswith(begins) and said[0].endswith("; went back to step-000002"), said
    assert "warning" not in second[1] and losses(run) == losses(straight)
    replaced, kept = list_checkpoints(run / "checkpoints")
    verify(replaced)
    verify(kept)


def test_without_a_fallback_or_a_whole_one_it_is_refused(recipe, straight):
    for name, steps, words, said in (
        ("stays", [4], ["run.checkpoint_fallback=false"], "; remove it, and the run goes on from the one before"),
        ("none", [2, 4], [], "; no other is whole: choose another run.name"),
    ):
        run = damaged_run(straight, name, *steps)
        before = (run / "metrics.jsonl").read_text()
        results = run_world(2, train_rank, [str(recipe), f"run.name={name}", *SAVING, *words])
        assert [code for code, _, _ in results] == [2, 2] and results[0][2].endswith(f"{said}\n"), results
        assert (run / "metrics.jsonl").read_text() == before


def of_two_kinds(words):
    from shardbook.run.checkpoint import load

    real, asked = load.state_kind, []

    def state_kind(*given):
        asked.append(real(*given))
        return asked[0] if len(asked) == 1 else "Lion"

    load.state_kind = state_kind
    return train_rank(words)


def test_moments_that_a_damaged_load_began_to_fill_are_not_begun_anew(recipe, straight):
    damaged_run(straight, "kinds", 4)
    results = run_world(2, of_two_kinds, [str(recipe), "run.name=kinds", *SAVING])
    said = "step-000002 cannot follow the load of a damaged one (optimizer state: of AdamW, here Lion); remove the"
    assert [code for code, _, _ in results] == [2, 2] and said in results[0][2], results


def test_the_disk_is_looked_at_before_weights_are_read(recipe, straight):
    """What is predicted is what is written, but for each rank's random state."""
    [(code, said, error)] = run_world(
        1, short_of_room, [str(recipe), "run.name=short", "train.save_total_limit=1", *SAVING]
    )
    assert code == 2 and " GB are free there, and 2 checkpoints of 0.000" in error, error
    assert "warning  train.save_total_limit = 1: a damaged checkpoint leaves none to go back to; set it to 2\n" in said
    needed = float(said.rpartition("predicted ")[2].split()[0])
    written = read_stored(straight / "checkpoints" / "step-000004").items.values()
    assert needed == sum(item.length for items in written for item in items if not item.name.startswith("own."))
    assert not (recipe.parent / "short").exists() and "weights  " not in said


def short_of_room(words):
    from types import SimpleNamespace

    from shardbook.run import directory
    from shardbook.run.checkpoint.save import predict_bytes

    def usage(path):
        return SimpleNamespace(free=int(1.5 * needed[0]))

    def predict(*given):
        needed.append(predict_bytes(*given))
        print("predicted", needed[0])
        return needed[0]

    needed = []
    replace(predict_bytes, predict)
    directory.shutil.disk_usage = usage
    return train_rank(words)


def digest(sharded, optimizer):
    return {name: tensor.tolist() for name, tensor in state_of(sharded, optimizer).items()}


def attacked(folder, bug=None):
    """A checkpoint with a bit flipped in many places, and one that only rank 1 cannot read: what each rank is told; and
    whether the good one still loads, with each rank's own random state."""
    import torch
    import torch.distributed as dist

    from shardbook.ranks.distributed import start_distributed
    from shardbook.run.checkpoint import load as loading
    from shardbook.run.checkpoint.format import Damaged, damaged

    start_distributed()
    bug and bug()
    rank = dist.get_rank()
    sharded, optimizer, advance = start()
    advance(1)
    torch.manual_seed(rank)
    good = save(folder, 1, sharded, optimizer)
    wanted, drawn, told = digest(sharded, optimizer), torch.rand(1), []

    def load(path):
        try:
            loading.load_checkpoint(path, sharded, optimizer)
        except Damaged as error:
            return str(error)
        return ""

    for number in range(24):
        copy = folder / f"{number}" / good.name
        if rank == 0:
            shutil.copytree(good, copy)
            files = ("rank-0.bin", "rank-1.bin", "rank-0.items", "rank-1.items", "state.json", "manifest.json")
            flip(copy / files[number % 6], (number + 1) / 25)
        dist.barrier()
        told.append(load(copy))
    real = loading.read_item

    def lies(path, name, *given):
        if rank == 1:
            raise damaged(path, name, "read by rank 1")
        return real(path, name, *given)

    loading.read_item = lies
    told.append(load(good))
    loading.read_item = real
    again = load(good) == "" and digest(sharded, optimizer) == wanted
    return told, again and torch.equal(torch.rand(1), drawn)


def test_what_one_rank_meets_all_ranks_are_told(tmp_path):
    (first, good), (second, also) = run_world(2, attacked, tmp_path)
    assert first == second and all("damaged (" in said for said in first) and len(first) == 25
    assert good and also


def of_two_causes(folder):
    """Rank 0 meets damage while rank 1 has no memory: what each raises, and again with the ranks exchanged; then of an
    error that cannot be sent as it is."""
    import torch
    import torch.distributed as dist

    from shardbook.ranks.distributed import start_distributed
    from shardbook.run.checkpoint import load as loading

    class Unsent(RuntimeError):
        def __init__(self, first, second):
            super().__init__(f"{first} {second}")

    start_distributed()
    sharded, optimizer, advance = start()
    advance(1)
    path, real, raised = save(folder, 1, sharded, optimizer), loading.read_item, []
    for error, rank in (
        *((torch.OutOfMemoryError("no memory"), rank) for rank in range(2)),
        (Unsent("gloo", "is closed"), 1),
    ):

        def read_item(path, name, *given, error=error, rank=rank):
            if dist.get_rank() == rank:
                raise error
            raise loading.damaged(path, name, "flipped")

        loading.read_item = read_item
        try:
            loading.load_checkpoint(path, sharded, optimizer)
        except Exception as met:
            raised.append(f"{type(met).__name__}: {met}")
    loading.read_item = real
    loading.load_checkpoint(path, sharded, optimizer)
    return raised


def test_damage_that_one_rank_meets_does_not_hide_what_another_lacks(tmp_path):
    """Else a sound checkpoint would be gone back from, or removed."""
    first, second = run_world(2, of_two_causes, tmp_path)
    assert first[:2] == second[:2] == ["OutOfMemoryError: no memory"] * 2
    assert (first[2], second[2]) == ("RuntimeError: Unsent: gloo is closed", "Unsent: gloo is closed")


def each_rank_by_itself():
    """Planted bug: a rank that meets damage goes back alone."""
    from shardbook.run.checkpoint import load

    load.gather_results = lambda make, shared: [make()]


@pytest.mark.slow
def test_a_rank_that_goes_back_alone_turns_it_red(tmp_path):
    (first, _), (second, _) = run_world(2, attacked, tmp_path, each_rank_by_itself)
    assert first != second and "" in first + second


def one_own_key():
    """Planted bug: the ranks' own states have one name, and one of them is stored."""
    from shardbook.run.checkpoint import save

    save.rank_key = lambda: "own"


@pytest.mark.slow
def test_a_random_state_that_is_another_ranks_turns_it_red(tmp_path):
    assert False in [good for _, good in run_world(2, attacked, tmp_path, one_own_key)]


def broken(folder, bug=None):
    """Saves with one number of rank 1 that is not finite, in each kind of tensor: what was said, and what was
    published; then with numbers so large that their norm is infinite."""
    import torch.distributed as dist

    from shardbook.ranks.distributed import start_distributed
    from shardbook.ranks.exits import RunFailed

    start_distributed()
    bug and bug()
    sharded, optimizer, advance = start()
    advance(1)
    rank, told = dist.get_rank(), []
    places = [next(iter(optimizer.state)), *next(iter(optimizer.state.values())).values()]
    for place in places:
        for value in (float("nan"), float("inf"), float("-inf")):
            local = (place.to_local() if hasattr(place, "to_local") else place).detach()
            kept = local.clone()
            if rank == 1 or local.dim() == 0:
                local.view(-1)[-1] = value
            try:
                told.append(save(folder, 1 + len(told), sharded, optimizer).name)
            except RunFailed as error:
                told.append(str(error).partition(": ")[2])
            local.copy_(kept)
    local = places[0].to_local().detach()
    local.fill_(1e30)
    return told, save(folder, 99, sharded, optimizer).name


SAID = " is not finite on rank 1, so it is not published; go on from the newest one with a lower optim.learning_rate"


def test_what_is_not_finite_is_not_published(tmp_path):
    (first, large), second = run_world(2, broken, tmp_path)
    assert (first, large) == second and large == "step-000099"
    assert len(first) == 12 and all(" is not finite on rank " in said for said in first), first
    assert sum(SAID in said for said in first) >= 9 and first[0].startswith("model."), first
    assert any("exp_avg_sq" in said for said in first)
    assert [each.name for each in tmp_path.iterdir()] == ["step-000099"]


def only_rank_0_looks():
    """Planted bug."""
    import torch.distributed as dist

    from shardbook.run.checkpoint import save

    real = save.check_finite
    save.check_finite = lambda *given: dist.get_rank() or real(*given)


@pytest.mark.slow
def test_a_check_on_one_rank_alone_turns_it_red(tmp_path):
    (first, _), _ = run_world(2, broken, tmp_path, only_rank_0_looks)
    assert any(said.startswith("step-") for said in first)
