"""A checkpoint that is written while steps go on is the one that a run would have waited for; one that fails is said,
and tried again."""

import errno
import filecmp
import json
import os
import shutil
import threading
import time

import pytest
from world import losses, run_train, run_world, train_rank

from shardbook.run.checkpoint.format import list_checkpoints, verify

SAVING = ("train.steps=6", "train.save_steps=2", "train.export=false")
ASYNC = "train.async_save=true"


@pytest.fixture(scope="module")
def waited(recipe):
    return run_train(2, recipe, "waited", *SAVING)


def slowly(words, bug=None):
    """A rank whose disk takes longer than a step. It says when its buffer was made."""
    from shardbook.run.checkpoint import async_save, disk

    real, make, begin, seen = disk.write, async_save.page_buffer, async_save.AsyncSave.begin, []
    async_save.page_buffer = lambda size, pin: (seen.append("made"), make(size, pin))[1]
    async_save.AsyncSave.begin = lambda *given: (seen.append("begun"), begin(*given))[1]

    def write(file, data):
        time.sleep(0.05)
        real(file, data)

    disk.write = write
    bug and bug()
    code, said, error = train_rank(words)
    return code, f"{said}{' '.join(seen)}", error


def assert_equal(run, waited):
    assert losses(run) == losses(waited)
    mine, theirs = (sorted((each / "checkpoints").rglob("*"), key=str) for each in (run, waited))
    assert [each.relative_to(run) for each in mine] == [each.relative_to(waited) for each in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one.suffix not in (".bin", ".items") or filecmp.cmp(one, other, shallow=False), one
        if one.name == "state.json":  # but for the log, whose rows have times
            assert timeless(one) == timeless(other)


def timeless(state):
    return {name: value for name, value in json.loads(state.read_text()).items() if name != "log"}


@pytest.mark.parametrize("mode", ["true", "wait"])
def test_it_is_bit_for_bit_the_one_that_would_be_waited_for(mode, recipe, waited):
    name, words = f"async-{mode}", [*SAVING, f"train.async_save={mode}"]
    results = run_world(2, slowly, [str(recipe), f"run.name={name}", *words])
    assert [code for code, _, _ in results] == [0, 0], results
    assert all(said.endswith("made begun begun begun") for _, said, _ in results), results  # before a step waits for it
    run = recipe.parent / name
    assert_equal(run, waited)
    shutil.rmtree(run / "checkpoints" / "step-000006")
    (run / "run.json").unlink()
    run_train(2, recipe, name, *words)
    assert_equal(run, waited)


def copying_slowly(seconds, words, bug=None):
    """A rank whose copy of what is saved ends after the next step has begun, unless that does not begin for so many
    `seconds`. It says in which order steps began and a copy ended."""
    from shardbook.run.checkpoint import async_save
    from shardbook.run.log.step_log import StepLog

    copy, begin, stepped, seen = async_save.StagedItems.copy, StepLog.begin, threading.Event(), []

    def copies(*given):
        stepped.wait(seconds)
        copy(*given)
        seen.append("copied")

    def begins(self, batch):
        seen.append("step")
        if seen.count("step") == 3:  # the save is that of step 2
            stepped.set()
        begin(self, batch)

    async_save.StagedItems.copy, StepLog.begin = copies, begins
    bug and bug()
    code, _, error = train_rank(words)
    return code, " ".join(seen), error


def the_wait_is_gone():
    """Planted bug: the next step waits for nothing."""
    from shardbook.run.checkpoint import async_save

    made = async_save.AsyncSave.__post_init__
    async_save.AsyncSave.__post_init__ = lambda self: (setattr(self, "waits", False), made(self))[1]


def order_of(recipe, mode, seconds, bug=None):
    """The order on both ranks, which is the same."""
    words = [str(recipe), f"run.name=order-{mode}-{seconds}", "train.steps=3", "train.save_steps=2"]
    words += ["train.export=false", f"train.async_save={mode}"]
    (code, order, error), other = run_world(2, copying_slowly, seconds, words, bug)
    assert code == 0 and (code, order, error) == other, error
    return order


BESIDE, BEFORE = "step step step copied", "step step copied step"


def test_with_wait_alone_the_next_step_begins_after_the_copy(recipe):
    assert order_of(recipe, "wait", 2) == BEFORE
    assert order_of(recipe, "true", 60) == BESIDE  # 60: a full machine may take long to begin a step


@pytest.mark.slow
def test_a_wait_that_is_gone_turns_it_red(recipe):
    assert order_of(recipe, "wait", 60, the_wait_is_gone) == BESIDE


def tensors_are_not_copied():
    """Planted bug: what is on the host already is not copied. It is written once the next step, if any, is done."""
    import torch

    from shardbook.run.checkpoint import async_save, disk

    write, step, begin, stepped = (
        disk.write,
        torch.optim.AdamW.step,
        async_save.AsyncSave.begin,
        threading.Event(),
    )
    async_save._copy = lambda part, buffer, begin: part
    async_save.AsyncSave.begin = lambda *given: (stepped.clear(), begin(*given))[1]
    torch.optim.AdamW.step = lambda *given, **named: (step(*given, **named), stepped.set())[0]
    disk.write = lambda *given: (stepped.wait(5), write(*given))[1]


@pytest.mark.slow
def test_what_steps_change_meanwhile_turns_it_red(recipe, waited):
    words = [str(recipe), "run.name=aliased", *SAVING, ASYNC]
    assert [code for code, _, _ in run_world(2, slowly, words, tensors_are_not_copied)] == [0, 0]
    with pytest.raises(AssertionError, match="step-000002"):
        assert_equal(recipe.parent / "aliased", waited)


def failing(times, words, bug=None):
    """A rank 1 whose disk is full at its first `times` saves."""
    from shardbook.run.checkpoint import save

    calls, real = [], save.write_items

    def write_items(side, rank, items):
        calls.append(1)
        if rank == 1 and len(calls) <= times:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(side, rank, items)

    save.write_items = write_items
    bug and bug()
    return train_rank(words)


def full_when_it_begins(times, words):
    """The disk has no room when the first `times` saves begin: they are not even planned."""
    from shardbook.run.checkpoint import format, save

    calls, real = [], format.shutil.disk_usage

    def disk_usage(path):
        calls.append(1)
        return real(path)._replace(free=0) if len(calls) <= times else real(path)

    begin = format.begin

    def begins(*given):
        format.shutil.disk_usage = disk_usage
        try:
            return begin(*given)
        finally:
            format.shutil.disk_usage = real

    save.begin = begins
    return train_rank(words)


def test_a_save_that_has_no_room_to_begin_is_tried_again_too(recipe):
    words = [str(recipe), "run.name=no-room", *SAVING, ASYNC]
    first, second = run_world(2, full_when_it_begins, 1, words)
    said = "step-000002: cannot be written (OSError: [Errno 28] No space left on device: "
    assert (first[0], second[0]) == (0, 0) and said in first[1] and "tried again" not in second[1], (first, second)
    found = list_checkpoints(recipe.parent / "no-room" / "checkpoints")
    assert [each.name for each in found] == ["step-000006", "step-000004"]
    for each in found:
        verify(each)
    results = run_world(2, full_when_it_begins, 2, [*words, "run.name=no-room-twice"])
    assert [code for code, _, _ in results] == [1, 1] and "the second in a row" in results[0][2], results
    assert not [*(recipe.parent / "no-room-twice" / "checkpoints").iterdir()]


SAID = "checkpoint of step {}: cannot be written (OSError: [Errno 28] No space left on device)"


def test_a_save_that_fails_is_said_and_tried_again(recipe):
    words = [str(recipe), "run.name=once", *SAVING, ASYNC]
    first, second = run_world(2, failing, 1, words)
    assert (first[0], second[0]) == (0, 0) and f"warning  {SAID.format(2)}; it is tried again" in second[1], second
    found = list_checkpoints(recipe.parent / "once" / "checkpoints")
    assert [each.name for each in found] == ["step-000006", "step-000004"]
    for each in found:
        verify(each)
    assert len(list((recipe.parent / "once" / "checkpoints").iterdir())) == 2


def test_two_in_a_row_end_the_run(recipe):
    words = [str(recipe), "run.name=twice", *SAVING, ASYNC]
    results = run_world(2, failing, 2, words)
    assert [code for code, _, _ in results] == [1, 1], results
    assert f"{SAID.format(4)}, the second in a row" in results[1][2], results[1]
    assert list_checkpoints(recipe.parent / "twice" / "checkpoints") == []


def errors_are_swallowed():
    """Planted bug."""
    from shardbook.run.checkpoint import save

    real = save.write_items

    def write_items(*given):
        try:
            return real(*given)
        except OSError:
            return {}

    save.write_items = write_items


@pytest.mark.slow
def test_an_error_of_the_thread_that_is_swallowed_turns_it_red(recipe):
    words = [str(recipe), "run.name=swallowed", *SAVING, ASYNC]
    _, second = run_world(2, failing, 1, words, errors_are_swallowed)
    assert f"warning  {SAID.format(2)}; it is tried again" not in second[1]
