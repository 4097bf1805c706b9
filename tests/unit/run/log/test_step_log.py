"""The log of steps: what the device measured is read one step late; no row is lost or out of order, and the first
number that is not finite ends the run by its own step."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardbook.axes import WORLD
from shardbook.gpus import gpu_of
from shardbook.model.flops import Flops
from shardbook.objectives import Objective
from shardbook.ranks.exits import RunFailed
from shardbook.ranks.signals import StopFlag
from shardbook.recipe import Recipe, Train
from shardbook.run.checkpoint.format import TrainState
from shardbook.run.log import step_log
from shardbook.run.log.console import Console
from shardbook.run.log.step_log import DeviceEvent, StepLog, StepTimer
from shardbook.run.prefetch import StepBatch

CPU = torch.device("cpu")


class Device:
    """A stand-in for the device's clock and for its events: they come when `catch_up` is called, or are waited for."""

    def __init__(self, monkeypatch):
        self.queued, self.now = [], 0.0  # events, and seconds of work
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", self.catch_up)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
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
def device(monkeypatch, offline_sums):
    return Device(monkeypatch)


@pytest.fixture(autouse=True)
def offline_sums(monkeypatch):
    """One rank alone: no group is there."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(dist, "all_gather_object", lambda gathered, mine: gathered.__setitem__(0, mine))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    for name in ("read_inside", "predict_traffic"):
        monkeypatch.setattr(step_log, name, lambda *given: {})


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Rows:
    """As a loader's."""

    consumed_rows, rows_per_step, accumulation, peek = 0, 4, 1, None

    def name_rows(self, first, micro):
        return f"rows {first + micro} to {first + micro}"


def build_log(folder, metrics=(), **train):
    """A log of one rank, which measures no memory and counts no traffic."""
    recipe = Recipe(train=Train(steps=5, **train), run={"report_to": "none"})
    layout = SimpleNamespace(mesh={}, term_copies=lambda of_sequences: 1, groups=lambda rank: {WORLD: [0]})
    objective = Objective(lambda *given: None, metrics=metrics)
    job = SimpleNamespace(
        recipe=recipe,
        layout=layout,
        config=None,
        loader=Rows(),
        objective=objective,
        flops=Flops(1, 1),
        forecast={},
        steps=5,
    )
    run = SimpleNamespace(path=folder, name="run")
    sharded = SimpleNamespace(
        model=torch.nn.Module(), offloaded=None, take_metrics=dict, note_routing=lambda: None, take_routing=list
    )
    sharded.expert_load = None
    ranks = SimpleNamespace(rank=0, world_size=1, ranks_per_node=1, is_main=True, device=CPU)
    optimizer = SimpleNamespace(state={})
    return StepLog(job, run, sharded, optimizer, TrainState(0, 0, {}), ranks, Console(False), StopFlag())


def take_steps(folder, seen, losses, device=None, logging=1, evaluates=(), saves=(), fails=None, norm=2.0):
    """As the loop does: of each step one second of the `device`. `seen`: of the rows that are there after each step."""
    log = build_log(folder, logging_steps=logging)
    with log.console.start(0, len(losses)), log:
        log.ledger.open = lambda: None
        for step, loss in enumerate(losses, 1):
            log.begin(StepBatch([], None, [10.0, 10.0], 0.25))
            if fails == step:
                raise KeyError("in the step")
            if device:
                device.queued.append(1.0)
            log.end(TrainState(step, step, {}), [torch.tensor([loss])], torch.tensor(norm), 0.5)
            if step in evaluates:
                log.add(lambda: {"eval/loss": 5.0})
            if step in saves:
                with log.paused():
                    seen.append([each["step"] for each in logged(folder)])
            seen.append([each["step"] for each in logged(folder)])
    return log


@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_a_row_is_written_when_the_next_step_is_on_its_way(where, request, tmp_path):
    seen, device = [], request.getfixturevalue("device") if where == "gpu" else None
    take_steps(tmp_path, seen, [1.0, 2.0, 3.0, 4.0], device)
    assert seen == [[], [1], [1, 2], [1, 2, 3]]
    rows = logged(tmp_path)
    assert [(row["step"], row["train/loss"], row["train/tokens"]) for row in rows] == [(n, n, n) for n in (1, 2, 3, 4)]
    assert list(rows[0])[:5] == ["step", "train/loss", "train/grad_norm", "train/learning_rate", "train/tokens"]
    assert [row["perf/loader_wait_seconds"] for row in rows] == [0.25] * 4
    if device:
        assert [row["perf/step_seconds"] for row in rows] == [1.0] * 4  # the device's own, whenever they are read


def test_an_evaluation_reads_first_and_ranks_ask_again_after_it(device, tmp_path):
    seen = []
    log = take_steps(tmp_path, seen, [1.0, 2.0, 3.0], device, evaluates=[2])
    assert seen == [[], [1, 2], [1, 2]] and log.stop.check_before_next_step
    assert ["eval/loss" in row for row in logged(tmp_path)] == [False, True, False]
    assert [row["perf/step_seconds"] for row in logged(tmp_path)] == pytest.approx([1.0] * 3, abs=0.01)


def test_a_save_finds_the_row_of_its_step(device, tmp_path):
    seen = []
    take_steps(tmp_path, seen, [1.0, 2.0, 3.0], device, saves=[2])
    assert seen == [[], [1, 2], [1, 2], [1, 2]]


def test_an_evaluation_before_the_first_step_has_a_row(tmp_path):
    log = build_log(tmp_path)
    with log.console.start(0, 5), log:
        log.add(lambda: {"eval/loss": 5.0})
        assert logged(tmp_path) == [{"step": 0, "eval/loss": 5.0}]


def test_rows_are_few_where_few_steps_are_logged(device, tmp_path):
    seen = []
    take_steps(tmp_path, seen, [1.0, 2.0, 3.0, 4.0, 5.0], device, logging=2, evaluates=[3])
    assert seen == [[], [], [2, 3], [2, 3], [2, 3, 4]]
    two, three, four = logged(tmp_path)
    assert three == {"step": 3, "eval/loss": 5.0}
    assert (two["perf/step_seconds"], four["perf/step_seconds"]) == pytest.approx((1.0, 1.0), abs=0.01)


@pytest.mark.parametrize("logging", [0, 1, 10])
@pytest.mark.parametrize("saves", [(), (2,)])
def test_what_is_not_finite_ends_the_run_by_its_own_step(device, tmp_path, saves, logging):
    """Before the next step's row, and before anything is saved; also where no step is logged."""
    seen = []
    with pytest.raises(RunFailed, match=r"^step 2: train/loss is nan .* look at rank 0: rows 4 to 4$"):
        take_steps(tmp_path, seen, [1.0, math.nan, 3.0, 4.0], device, logging, saves=saves)
    assert [row["step"] for row in logged(tmp_path)] == [1] * (logging == 1) and len(seen) == 2 - len(saves)


def test_a_norm_that_is_not_finite_names_all_rows(tmp_path):
    with pytest.raises(RunFailed, match=r"^step 1: .* look at rows 0 to 3 of the run: every loss is finite, so"):
        take_steps(tmp_path, [], [1.0], norm=math.inf)


@pytest.mark.parametrize("comes", [True, False])
def test_a_run_that_fails_keeps_its_last_row(device, tmp_path, monkeypatch, comes):
    """Unless its device does not come so far: of a rank that is lost nobody waits for ever."""
    monkeypatch.setattr(step_log, "LAST_SECONDS", 0.05)
    if comes:
        monkeypatch.setattr(step_log.time, "sleep", lambda seconds: device.catch_up())
    with pytest.raises(KeyError):
        take_steps(tmp_path, [], [1.0, 2.0, 3.0], device, fails=3)
    assert [row["step"] for row in logged(tmp_path)] == [1, 2][: 1 + comes]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            (math.nan, math.nan, 2.0),
            "step 1: train/loss is nan and train/grad_norm 2; lower optim.learning_rate, or ",
        ),
        ((0.5, 1.0, math.inf), "step 1: train/loss is 0.5 and train/grad_norm inf; lower optim.learning_rate, or "),
        ((0.5, math.inf, 2.0), "step 1: train/rewards/margins is inf; lower optim.learning_rate, or look at [pref"),
    ],
)
def test_what_is_not_finite_is_named(tmp_path, values, line):
    log = build_log(tmp_path, metrics=("rewards/margins",))
    loss, margin, norm = values
    with pytest.raises(RunFailed) as error, log:
        log.end(TrainState(1, 1, {}), [torch.tensor([loss, margin])], torch.tensor(norm), 0.5)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(("begins_at", "step", "named"), [(4, 5, True), (4, 6, False), (0, 1, False)])
def test_a_checkpoint_that_may_be_spoilt_is_named(tmp_path, begins_at, step, named):
    """Where the first step from it is not finite: each start from there would end so."""
    log = build_log(tmp_path)
    log.step_before = begins_at
    with pytest.raises(RunFailed) as error, log:
        log.end(TrainState(step, 1, {}), [torch.tensor([1.0])], torch.tensor(math.nan), 0.5)
    words = (
        ". It is the first step from the checkpoint of step 4: where that is spoilt already, begin another run.name "
    )
    assert (words + "with train.resume_from_checkpoint of an older one" in str(error.value)) is named


def test_a_planted_row_that_is_not_checked_turns_it_red(monkeypatch, tmp_path):
    monkeypatch.setattr(StepLog, "_check", lambda log, pending, gathers: {})
    for test in (test_a_norm_that_is_not_finite_names_all_rows,):
        with pytest.raises(pytest.fail.Exception):
            test(tmp_path)


@pytest.fixture
def clock(monkeypatch):
    """The seconds that pass, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(step_log.time, "perf_counter", lambda: now[0])
    return now


def begin(timer, tokens, pairs):
    timer.add(StepBatch([], None, [tokens, pairs]))


def test_mfu_is_absent_without_a_gpu(monkeypatch, clock):
    def four_seconds_of_two_steps():
        timer = StepTimer()
        begin(timer, 1000, 3000)
        begin(timer, 1000, 5000)
        clock[0] += 4.0
        return timer.speed(DeviceEvent(), Flops(per_token=10**9, per_pair=10**8), 4)

    speed = {"perf/step_seconds": 2.0, "perf/tokens_per_second_per_device": 125.0, "perf/loader_wait_seconds": 0}
    assert four_seconds_of_two_steps() == speed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 PCIe")
    monkeypatch.setattr(
        torch.cuda, "Event", lambda enable_timing: SimpleNamespace(**dict.fromkeys(("record", "synchronize"), int))
    )
    monkeypatch.setattr(DeviceEvent, "since", lambda ended, earlier: ended.seconds - earlier.seconds)
    flops = 2000 * 1e9 + 8000 * 1e8  # on four devices in four seconds
    assert four_seconds_of_two_steps()["perf/mfu"] == pytest.approx(flops / 16 / gpu_of("NVIDIA H100 PCIe").flops)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some new GPU")
    assert "perf/mfu" not in four_seconds_of_two_steps()


def test_steps_time_leaves_out_evaluations_and_nothing_else(clock):
    timer = StepTimer()
    begin(timer, 100, 0)
    clock[0] += 3.0
    with timer.paused():
        clock[0] += 50.0
    clock[0] += 1.0  # logging, say
    ended = DeviceEvent()
    assert timer.speed(ended, Flops(1, 1), 1)["perf/step_seconds"] == 4.0
    clock[0] += 2.0  # logging of the row that was taken is part of the next
    timer = StepTimer(began=ended)
    begin(timer, 100, 0)
    clock[0] += 1.0
    assert timer.speed(DeviceEvent(), Flops(1, 1), 1)["perf/step_seconds"] == 3.0


def test_memory_of_steps_that_compile_is_no_steps_peak(monkeypatch, tmp_path):
    log, resets = build_log(tmp_path), []
    log.ledger.open, log.warmup_steps = (lambda: None), 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(log.steps_begun))
    for _ in range(4):
        log.begin(StepBatch([], None, [1.0, 1.0]))
    assert resets == [2]
