"""Steps made ahead are those that a run without a thread takes, after a stop too; their errors are the run's."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from datasets import Dataset

from shardbook.data.loader import Batching, Loader, RowError
from shardbook.data.tokenized import Documents
from shardbook.ranks.exits import RunFailed
from shardbook.ranks.signals import StopFlag
from shardbook.run import prefetch, step_flags
from shardbook.run.prefetch import BatchPrefetcher
from shardbook.run.step_flags import StepFlags

COUNT = 7


def loader(rows=None):
    rows = rows or [{"input_ids": [number] * (number + 2), "mask": [True] * (number + 2)} for number in range(COUNT)]
    documents = Documents(Dataset.from_list(rows), [(number,) for number in range(len(rows))], 3.0, "")
    return Loader(documents, Batching(None, 2, 0, 1), 2, 5)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for module in (prefetch, step_flags):
        monkeypatch.setattr(module, "begin_sum", lambda *values: lambda: [float(value) for value in values])


def ids(micros):
    return [micro.input_ids.tolist() for micro in micros]


def never(sums=None):
    """Flags of a run that nobody asked to stop; what its save is told is added to `sums`."""
    saver = SimpleNamespace(flags=lambda: [1.0, 0.0, 0.0], take_flag_sums=[].append if sums is None else sums.append)
    return StepFlags(StopFlag(), saver)


def taken(from_loader, steps):
    found, run = [], BatchPrefetcher(from_loader, never())
    for _ in range(steps):
        step = run.next_step()
        assert step.totals.tokens == sum(len(micro.targets) for micro in step.micros)
        assert step.work == [sum(m.input_ids.numel() for m in step.micros), sum(m.pairs for m in step.micros)]
        found.append((ids(step.micros), from_loader.state_dict()))
        run.prefetch()
    return found


def test_steps_are_those_of_a_loader_without_a_thread():
    plain, found = loader(), taken(loader(), 5)
    for step, (micros, state) in enumerate(found):
        assert micros == ids(plain.step_at(step * plain.rows_per_step))
        assert state["consumed_rows"] == (step + 1) * plain.rows_per_step  # not what lies ready


def continued(state):
    again = loader()
    again.load_state_dict(state)
    return taken(again, 2)


def test_a_resumed_run_goes_on_with_the_step_that_was_not_trained():
    straight = taken(loader(), 5)
    assert [micros for micros, _ in continued(straight[2][1])] == [micros for micros, _ in straight[3:]]


def test_a_planted_stale_step_is_seen(monkeypatch):
    """Planted bug: what lies ready is saved as trained, so that a resumed run leaves a step out."""
    real = BatchPrefetcher.next_step

    def next_step(steps):
        taken_step = real(steps)
        steps.loader.consumed_rows = steps.next_row
        return taken_step

    monkeypatch.setattr(BatchPrefetcher, "next_step", next_step)
    for test in (
        test_steps_are_those_of_a_loader_without_a_thread,
        test_a_resumed_run_goes_on_with_the_step_that_was_not_trained,
    ):
        with pytest.raises(AssertionError):
            test()


def test_who_is_asked_to_stop_has_not_taken_the_step():
    here, flags = loader(), never()
    run = BatchPrefetcher(here, flags)
    run.next_step()
    flags.stop.asked = True
    run.prefetch()
    assert run.next_step() is None and here.consumed_rows == here.rows_per_step


def test_who_is_asked_after_the_counts_began_is_heard_where_ranks_ask_again():
    here, flags = loader(), never()
    run = BatchPrefetcher(here, flags)
    flags.stop.asked = flags.stop.check_before_next_step = True  # in an evaluation, whose end sets it on every rank
    assert run.next_step() is None and here.consumed_rows == 0
    run.prefetch()
    assert not flags.stop.check_before_next_step and run.next_step() is None


def test_a_thread_makes_them_and_what_is_waited_for_is_told(monkeypatch):
    here, threads = loader(), []
    real = here.step_at
    here.step_at = lambda start: (threads.append(threading.current_thread().name), real(start))[1]
    run = BatchPrefetcher(here, never())
    run.next_step()
    run.prefetch()
    assert all(name.startswith("loader") for name in threads)
    assert run.next_step().waited_seconds >= 0


def test_what_a_step_waited_for_its_rows_is_told_with_it():
    here, gate = loader(), threading.Event()
    run, real = BatchPrefetcher(here, never()), here.step_at
    assert run.next_step().waited_seconds == 0  # nothing computed yet that could hide it
    run.prefetch()
    here.step_at = lambda start: (gate.wait(60), real(start))[1]
    run.next_step()
    run.prefetch()  # of what the thread had begun before; it begins the one behind the gate
    threading.Timer(0.2, gate.set).start()
    run.next_step()
    run.prefetch()
    assert 0.1 < run.next_step().waited_seconds < 60


def test_an_error_of_the_thread_is_the_runs_with_its_rows():
    good = {"input_ids": [1, 2], "mask": [True, True]}
    here = loader([good] * 4)

    class Encoded:
        def __getitem__(self, number):
            if number == 2:
                raise OSError("Truncated file")
            return good

    here.documents = Documents(Encoded(), here.documents.rows, 3.0, "")  # type: ignore[arg-type]
    message = r"data.train: rows [02] to [13] of the run \(documents (2, \d|\d, 2)\) cannot be read: OSError: Truncated"
    run = BatchPrefetcher(
        here, never()
    )  # says nothing yet: the step that runs is logged and saved first, or is the last
    with pytest.raises(RunFailed, match=message):
        run.next_step()


def test_who_stops_does_not_need_the_rows_of_the_next_step():
    here, flags = loader(), never()
    run = BatchPrefetcher(here, flags)
    run.next_step()
    run._future.result()
    flags.stop.asked = True
    run.prefetch()
    run._prefetched = replace(run._prefetched, error=RowError("of the step that nobody begins"))
    assert run.next_step() is None


def test_flags_of_any_number_of_ranks_stay_apart(monkeypatch):
    """Planted bug until 0.2: flags were digits of one number, and of 8,192 ranks a sum carried into the next flag."""
    ranks, sums = 10_000, []
    for module in (prefetch, step_flags):
        monkeypatch.setattr(module, "begin_sum", lambda *values: lambda: [float(ranks * value) for value in values])
    here = loader()
    run = BatchPrefetcher(here, never(sums))
    step = run.next_step()
    assert sums == [[ranks, 0, 0]] and step.totals.tokens == ranks * sum(len(micro.targets) for micro in step.micros)
    run.flags.stop.asked = True
    run.prefetch()
    assert run.next_step() is None and sums == [[ranks, 0, 0]] * 2
