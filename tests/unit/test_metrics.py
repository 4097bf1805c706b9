"""metrics.jsonl and trackers: nothing lost, nothing twice, and no tracker ends a run."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shardbook.run.metrics as metrics
from shardbook.gpus import gpu_of
from shardbook.model.causal_lm import Flops
from shardbook.paths import write_whole
from shardbook.recipe import Run


def recorder(folder, tracker="none", main=True, done=0):
    return metrics.Recorder(folder, "run", Run(report_to=tracker), {"stage": "zero3"}, main, done)


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_resuming_drops_what_will_be_written_again(tmp_path):
    first = recorder(tmp_path)
    for step in range(5):
        first.log(step, {"train/loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "tra')  # killed in mid-line
    with recorder(tmp_path, done=3) as again:
        again.log(4, {"train/loss": 2.0})
    assert steps(tmp_path) == [0, 1, 2, 3, 4]
    recorder(tmp_path).log(0, {})
    assert steps(tmp_path) == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_names_the_file(tmp_path):
    """/dev/full takes nothing: an error of writing has a reason and no name, and half a file may not stay."""
    first = recorder(tmp_path)
    first.file = Path("/dev/full").open("a")  # noqa: SIM115
    for write in (lambda: first.log(1, {}), lambda: first.__exit__(None, None, None)):
        with pytest.raises(OSError, match="No space left on device") as caught:
            write()
        assert caught.value.filename == str(tmp_path / "metrics.jsonl")
    (tmp_path / "page.html.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*page\.html'"):
        write_whole(tmp_path / "page.html", "half")
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_resuming_keeps_samples_with_whatever_unicode_calls_a_line(tmp_path):
    samples = [{"step": step, "completion": "a\u2028b\u0085c\nd"} for step in (2, 4)]
    recorder(tmp_path).log_samples(samples)
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write('{"step": 2, "comp 日'.encode()[:-1])  # killed in mid-line, and inside a character
    recorder(tmp_path, done=3)
    assert [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().split("\n") if line] == samples[:1]


def test_only_rank_0_writes(tmp_path):
    with recorder(tmp_path, main=False) as quiet:
        quiet.log(1, {"train/loss": 1.0})
    assert not list(tmp_path.iterdir())


def test_a_failing_tracker_is_said_once_and_dropped(tmp_path, monkeypatch, capsys):
    import wandb

    class Failing:
        calls = 0

        def define_metric(self, *words, **more):
            pass

        def log(self, values):
            Failing.calls += 1
            raise ConnectionError("the network is gone")

    monkeypatch.setattr(wandb, "init", lambda **settings: Failing())
    with recorder(tmp_path, "wandb") as broken:
        for step in (1, 2, 3):
            broken.log(step, {"train/loss": 1.0})
    assert steps(tmp_path) == [1, 2, 3]
    assert Failing.calls == 1
    assert capsys.readouterr().out.count("the network is gone; the run goes on without it") == 1


def test_a_tracker_that_does_not_start_is_no_failure(tmp_path, monkeypatch, capsys):
    import wandb

    def refuse(**settings):
        raise RuntimeError("wrong key")

    monkeypatch.setattr(wandb, "init", refuse)
    recorder(tmp_path, "wandb").log(1, {})
    assert "wrong key; the run goes on" in capsys.readouterr().out
    assert steps(tmp_path) == [1]


def test_kept_bytes_counts_each_storage_once():
    base = torch.zeros(100)
    assert metrics.kept_bytes([base[:10], base[50:], None, torch.zeros(3, dtype=torch.bfloat16)]) == 400 + 6


@pytest.fixture
def clock(monkeypatch):
    """The seconds that pass, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    return now


def test_mfu_is_absent_without_a_gpu(monkeypatch, clock):
    def four_seconds_of_two_steps():
        pace.add(1000, 3000)
        pace.add(1000, 5000)
        clock[0] += 4.0
        return pace.take()()

    pace = metrics.StepTimer(4, Flops(per_token=10**9, per_pair=10**8))
    assert four_seconds_of_two_steps() == {"perf/step_seconds": 2.0, "perf/tokens_per_second_per_device": 125.0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 PCIe")
    monkeypatch.setattr(
        torch.cuda, "Event", lambda enable_timing: SimpleNamespace(**dict.fromkeys(("record", "synchronize"), int))
    )
    monkeypatch.setattr(metrics.DeviceEvent, "since", lambda ended, earlier: ended.seconds - earlier.seconds)
    flops = 2000 * 1e9 + 8000 * 1e8  # on four devices in four seconds
    assert four_seconds_of_two_steps()["perf/mfu"] == pytest.approx(flops / 16 / 756e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some new GPU")
    assert "perf/mfu" not in four_seconds_of_two_steps()


def test_the_pace_leaves_out_evaluations_and_nothing_else(clock):
    pace = metrics.StepTimer(1, Flops(1, 1))
    pace.add(100, 0)
    clock[0] += 3.0
    with pace.paused():
        clock[0] += 50.0
    clock[0] += 1.0  # logging, say
    assert pace.take()()["perf/step_seconds"] == 4.0
    clock[0] += 2.0  # logging of the row that was taken is part of the next
    pace.add(100, 0)
    clock[0] += 1.0
    assert pace.take()() == {"perf/step_seconds": 3.0, "perf/tokens_per_second_per_device": pytest.approx(100 / 3)}


def test_memory_of_steps_that_compile_is_no_steps_peak(monkeypatch):
    resets, pace = [], metrics.StepTimer(1, Flops(1, 1), first_steps=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(pace.steps_before))
    for _ in range(4):
        pace.add(1, 1)
    assert resets == [2]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H20-3e", 148e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_peak_flops_are_those_of_the_very_card(name, peak):
    gpu = gpu_of(name)
    assert (gpu and gpu.flops) == peak


def test_out_of_memory_says_what_was_predicted_measured_and_would_fit(monkeypatch):
    """As on a GPU of 2 GB, whose allocator gave up."""
    from test_peak import lay_out, settings

    from shardbook.parallel.sharding import ShardedModel
    from shardbook.ranks.exits import RunFailed
    from shardbook.run.out_of_memory import OomGuard

    recipe = settings(parallel={"stage": "zero2"}, data={"max_length": 8192})
    layout, made = lay_out(recipe, layers=32)
    model = torch.nn.Linear(1000, 1000, bias=False)
    model(torch.ones(1, 1000)).sum().backward()
    fits = OomGuard(
        SimpleNamespace(layout=layout, config=made, recipe=recipe, unplanned=""), ShardedModel(model, layout, {})
    )
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=2 * 10**9),
        "max_memory_allocated": lambda: 19 * 10**8,
        "max_memory_reserved": lambda: 2 * 10**9,
        "memory_stats": dict,
        "reset_peak_memory_stats": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    message = (
        r"^out of memory: CUDA out of memory. Predicted at the peak: 4\.7 GB \(params 0\.0, .*activations 4\.6, "
        r"working 0\.1\)\. Measured in GB: params 0\.0, grads 0\.0, optimizer 0\.0, peak 1\.9, reserved_peak 2\.0\. "
        r"The smallest change that would fit: train\.per_device_train_batch_size=2 "
        r"train\.gradient_accumulation_steps=4$"
    )
    with pytest.raises(RunFailed, match=message), fits:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 MiB")
    with pytest.raises(RuntimeError, match="another"), fits:
        raise RuntimeError("another error passes")
    monkeypatch.undo()
    on_cpu = (
        r"^out of memory: the machine gives no more memory to a tensor of \d+\.\d GB\. Predicted at the peak: 4\.7 GB "
        r".*\. Measured in GB: params 0\.0, grads 0\.0, optimizer 0\.0\. "
    )
    with pytest.raises(RunFailed, match=on_cpu), fits:
        torch.empty(2**60, dtype=torch.uint8)  # torch's own error, on any machine
    with pytest.raises(RunFailed, match=r"^out of memory: the machine gives no more memory\. Predicted"), fits:
        raise MemoryError


def test_what_one_watches_is_on_the_console(capsys):
    """Of pairs accuracy and margin, of a student its divergence; of a row that has only held-out ones those."""
    from shardbook.run.console import Console

    console = Console(is_main=True)
    console.steps = 9
    console.show_step(3, {"train/loss": 0.5, "train/rewards/accuracies": 0.625, "train/rewards/margins": 0.25})
    console.show_step(0, {"eval/loss": 0.7, "eval/accuracy": 0.5, "eval/margin": -0.125})
    console.show_step(4, {"train/loss": 0.5, "train/kl": 0.03125, "eval/loss": 0.25, "eval/kl": 9.0})
    assert capsys.readouterr().out.splitlines() == [
        "step 3/9  loss 0.5000  accuracy 62%  margin 0.250",
        "step 0/9  eval 0.7000  accuracy 50%  margin -0.125",
        "step 4/9  loss 0.5000  eval 0.2500  kl 0.0312",
    ]
