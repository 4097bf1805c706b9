"""metrics.jsonl and trackers: nothing lost, nothing twice, and no tracker ends a run."""

import json
from pathlib import Path

import pytest

from shardbook.paths import write_whole
from shardbook.recipe import Run
from shardbook.run.log.recorder import Recorder


def recorder(folder, tracker="none", main=True, done=0):
    return Recorder(folder, "run", Run(report_to=tracker), {"stage": "zero3"}, main, done)


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

        def log(self, values, step):
            Failing.calls += 1
            raise ConnectionError("the network is gone")

    monkeypatch.setattr(wandb, "init", lambda **settings: Failing())
    monkeypatch.setattr(wandb, "config", {})
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
