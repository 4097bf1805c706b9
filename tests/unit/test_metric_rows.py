"""Rows of metrics: what the device measured is read while the next step computes; none is lost or out of order."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from world import run_world

from shardbook.model.causal_lm import Flops
from shardbook.ranks.exits import RunFailed
from shardbook.ranks.signals import StopFlag
from shardbook.recipe import Run
from shardbook.run import metrics, rows
from shardbook.run.console import Console
from shardbook.run.nonfinite import FirstNonFinite


class Device:
    """A stand-in for the device's clock and for its events: they come when `catch_up` is called, or are waited for."""

    def __init__(self, monkeypatch):
        self.queued, self.now = [], 0.0  # events, and seconds of work
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, self.catch_up)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "one that is not known")
        monkeypatch.setattr(torch.cuda, "Event", self.event)

    def catch_up(self, event=None):
        """Do what is queued, up to `event`."""
        while self.queued and not (event and event.query()):
            each = self.queued.pop(0)
            if isinstance(each, float):
                self.now += each
            else:
                each.came = self.now

    def event(self, enable_timing):
        return Event(self)


class Event:
    came = None

    def __init__(self, device):
        self.device = device

    def record(self):
        self.device.queued.append(self)

    def query(self):
        return self.came is not None

    def synchronize(self):
        self.device.catch_up(self)

    def elapsed_time(self, later):
        return 1000 * (later.came - self.came)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    return Device(monkeypatch)


@pytest.fixture
def here(monkeypatch, tmp_path):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    return tmp_path


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def first_nonfinite():
    loader = SimpleNamespace(consumed_rows=0, rows_per_step=4, accumulation=1)
    return FirstNonFinite(loader, 0, torch.device("cpu"))


def take_steps(folder, seen, losses, device=None, logging=1, pauses=(), fails=None):
    """As the loop does: of each step one second of the `device`. `seen`: of the rows that are there after each step."""
    recorder, console = metrics.Recorder(folder, "run", Run(report_to="none"), {}, True, 0), Console(False)
    stop, pace = StopFlag(), metrics.StepTimer(1, Flops(1, 1))
    nonfinite = first_nonfinite()
    reads = rows.Rows(recorder, console, ["train/loss"], pace, stop, nonfinite)
    with recorder, console.start(0, len(losses)), reads as here:
        pace.begin()
        for step, loss in enumerate(losses, 1):
            pace.add(10, 10)
            row = []
            if fails == step:
                raise KeyError("in the step")
            if device:
                device.queued.append(1.0)
            nonfinite.note(step, torch.tensor(2.0), [])
            if step % logging == 0:
                row = [here.read(step, torch.tensor([loss]), torch.tensor(2.0)), {"train/tokens": step}, pace.take()]
            if step in pauses:
                with here.paused():
                    row += [{"eval/loss": 5.0}]
            here.log(step, row)
            seen.append([each["step"] for each in logged(folder)])
    return stop


def test_on_a_gpu_a_row_is_written_when_the_next_step_is_on_its_way(device, tmp_path):
    seen = []
    take_steps(tmp_path, seen, [1.0, 2.0, 3.0, 4.0], device)
    assert seen == [[], [1], [1, 2], [1, 2, 3]]
    found = logged(tmp_path)
    assert [(row["step"], row["train/loss"], row["train/tokens"]) for row in found] == [(n, n, n) for n in (1, 2, 3, 4)]
    assert [row["perf/step_seconds"] for row in found] == [1.0] * 4  # the device's own, whenever they are read
    order = ["step", "train/loss", "train/grad_norm", "train/tokens"]
    assert list(found[0]) == [*order, *list(found[0])[4:]]


def test_an_evaluation_reads_first_and_ranks_ask_again_after_it(device, tmp_path):
    seen = []
    stop = take_steps(tmp_path, seen, [1.0, 2.0, 3.0], device, pauses=[2])
    assert seen == [[], [1, 2], [1, 2]] and stop.again
    assert ["eval/loss" in row for row in logged(tmp_path)] == [False, True, False]
    assert [row["perf/step_seconds"] for row in logged(tmp_path)] == pytest.approx([1.0] * 3, abs=0.01)


def test_rows_are_few_where_few_steps_are_logged(device, tmp_path):
    seen = []
    take_steps(tmp_path, seen, [1.0, 2.0, 3.0, 4.0, 5.0], device, logging=2)
    assert seen == [[], [], [2], [2], [2, 4]]


def test_on_a_cpu_a_row_is_there_after_its_step(here):
    seen = []
    take_steps(here, seen, [1.0, 2.0, 3.0])
    assert seen == [[1], [1, 2], [1, 2, 3]]


@pytest.mark.parametrize("pauses", [(), (2,)])
def test_what_is_not_finite_ends_the_run_by_its_own_step(device, tmp_path, pauses):
    """Before the next step's row, and before anything is saved."""
    seen = []
    with pytest.raises(RunFailed, match=r"^step 2: train/loss is nan"):
        take_steps(tmp_path, seen, [1.0, math.nan, 3.0, 4.0], device, pauses=pauses)
    assert [row["step"] for row in logged(tmp_path)] == [1] and len(seen) == 2 - len(pauses)


@pytest.mark.parametrize("comes", [True, False])
def test_a_run_that_fails_keeps_its_last_row(device, tmp_path, monkeypatch, comes):
    """Unless its device does not come so far: of a rank that is lost nobody waits for ever."""
    monkeypatch.setattr(rows, "LAST_SECONDS", 0.05)
    if comes:
        monkeypatch.setattr(rows.time, "sleep", lambda seconds: device.catch_up())
    with pytest.raises(KeyError):
        take_steps(tmp_path, [], [1.0, 2.0, 3.0], device, fails=3)
    assert [row["step"] for row in logged(tmp_path)] == [1, 2][: 1 + comes]


def read(loss, margin, norm):
    import torch.distributed as dist

    from shardbook.ranks.exits import RunFailed

    dist.init_process_group("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
    names = ["train/loss", "train/rewards/margins"]
    nonfinite, norm = first_nonfinite(), torch.tensor(norm)
    nonfinite.note(3, norm, [])
    try:
        return str(rows.read_loss(torch.tensor([loss, margin]), names, norm, 3, nonfinite)[0]())
    except RunFailed as error:
        return str(error)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            (0.5, 1.0, 2.0),
            "{'train/loss': 0.5, 'train/rewards/margins': 1.0, 'train/grad_norm': 2.0}",
        ),
        ((math.nan, math.nan, 2.0), "step 3: train/loss is nan and train/grad_norm 2.0; lower optim.learning_rate"),
        ((0.5, 1.0, math.inf), "step 3: train/loss is 0.5 and train/grad_norm inf; lower optim.learning_rate"),
        (
            (0.5, math.inf, 2.0),
            "step 3: train/rewards/margins is inf; lower optim.learning_rate, or look at [preference]",
        ),
    ],
)
def test_what_is_not_finite_is_named(values, said):
    assert run_world(1, read, *values)[0].startswith(said)
