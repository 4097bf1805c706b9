"""`shardbook compare` as a user types it: fresh processes, a failed variant, the report, what wandb recorded."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_file import read_wandb
from world import losses, metrics
from zygote import WARM

from shardbook import cli
from shardbook.compare.outcome import read_outcome
from shardbook.compare.page import LIBRARY
from shardbook.compare.workspace import PANELS, build_report, build_workspace

pytestmark = pytest.mark.usefixtures("warm_ranks")  # but of what is marked cold
BIN = Path(sys.executable).parent
STAGES = (
    "ddp zero3 zero3,data.train=nowhere.jsonl zeropp,parallel.quantize_gradients=[8,8],activation.checkpointing=full"
)
FOLDERS = ["ddp", "zero3", "zeropp_parallel.quantize_gradients-_8_8_activation.checkpointing-full"]
# what a GPU alone measures
GPU_ONLY = {"perf/mfu", "memory/peak_bytes", "memory/reserved_peak_bytes"}


def compare(*words, **more):
    return subprocess.run([BIN / "shardbook", "compare", *map(str, words)], capture_output=True, text=True, **more)


@pytest.fixture(scope="module")
def compared(recipe, zygote):
    words = ("run.name=both", "run.report_to=['wandb', 'tensorboard']")
    result = compare(recipe, "--stages", STAGES, *words, env=os.environ | {WARM: zygote})
    return result, recipe.parent / "both"


@pytest.mark.slow
def test_a_failed_variant_is_reported_and_the_rest_go_on(compared):
    result, folder = compared
    assert result.returncode == 1, result.stderr
    assert "[1/4] ddp: parallel.stage=ddp" in result.stdout
    assert (
        'parallel.quantize_weights=8 parallel.secondary_shard="node" parallel.quantize_gradients=[8,8]' in result.stdout
    )
    assert re.search(r"\[2/4\] zero3  step 5/5  loss \d", result.stdout)
    assert "[3/4] zero3,data.train=nowhere.jsonl  shardbook: data.train" in result.stdout
    assert f"failed, exit code 2; its output is in {folder}/zero3_data.train-nowhere.jsonl.log" in result.stdout
    assert result.stdout.splitlines()[-1] == f"report   {folder / 'report.html'}"
    assert "same losses" in result.stdout and "bitwise" in result.stdout


@pytest.mark.slow
def test_the_numbers_of_the_report_are_the_runs(compared):
    folder = compared[1]
    report = json.loads((folder / "report.json").read_text())
    ddp, zero3, zeropp, failed = report["variants"]
    assert report["baseline"] == ddp["name"] == "ddp" and not failed["finished"]
    for variant, run in zip((ddp, zero3, zeropp), FOLDERS, strict=True):
        counted = metrics(folder / run)[1]
        assert variant["losses"] == losses(folder / run) and variant["steps"] == [1, 2, 3, 4, 5]
        assert variant["memory"]["measured"] == variant["memory"]["predicted"]
        assert variant["memory"]["measured"]["params"] == counted["memory/params_bytes"]
        assert variant["traffic"]["measured"] == variant["traffic"]["predicted"]
        assert sum(variant["traffic"]["measured"].values()) == sum(
            counted[f"comm/{op}_bytes"] for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        )
    assert ddp["losses"] == zero3["losses"] and zero3["first_different_step"] is None
    # two ranks: half of everything but the padding; 2 gathers and 1 reduction for an all-reduce that passes twice
    assert zero3["verdict"] == "same losses bitwise; 50% less memory; 9% lower peak by formula; 1.4x traffic"
    assert zeropp["first_different_step"] == 1 and zeropp["verdict"].startswith("losses differ from step 1, by ")
    assert failed["verdict"] == "it ended before its first step"
    paper = zero3["memory"]["paper"]
    assert paper["optimizer"] == 6 * paper["params"] == 6 * paper["grads"]  # 2 + 2 + 12 over two ranks


@pytest.mark.slow
def test_the_page_has_every_number(compared):
    folder = compared[1]
    page = (folder / "report.html").read_text().replace(LIBRARY.read_text(), "")
    for loss in losses(folder / "ddp"):
        assert repr(loss) in page
    assert not re.search(r'(src|href)="(?!#|data:)', page)  # self-contained
    assert "it ended before its first step" in page


@pytest.mark.slow
def test_wandb_has_one_group_and_every_metric(compared):
    folder = compared[1]
    for run, stage in zip(FOLDERS, ("ddp", "zero3", "zeropp"), strict=True):
        (file,) = (folder / run / "wandb").glob("offline-run-*/*.wandb")
        found = read_wandb(file)
        assert (found.group, found.job_type) == ("both", stage)
        config = found.config
        assert (config["stage"], config["dp_shard_size"]) == (stage, 1 if stage == "ddp" else 2)
        assert config["checkpointing"] == ("full" if stage == "zeropp" else "none")
        assert config["learning_rate"] == 0.003 and config["optim_name"] == "adamw" and config["world_size"] == 2
        assert [row["train/global_step"] for row in found.rows] == [0, 1, 2, 3, 4, 5]
        assert [row["_step"] for row in found.rows] == [0, 1, 2, 3, 4, 5]
        for row, written in zip(found.rows, metrics(folder / run), strict=True):
            assert {key: row[key] for key in written if key != "step"} == {
                key: value for key, value in written.items() if key != "step"
            }


@pytest.mark.slow
def test_every_panel_of_the_workspace_names_a_metric_that_runs_log(compared):
    folder = compared[1]
    logged = {key for run in FOLDERS for row in metrics(folder / run) for key in row}
    drawn = {name for panels in PANELS.values() for panel in panels for name in panel["metrics"]}
    assert drawn - logged == GPU_ONLY
    axes = {panel.get("x") for panels in PANELS.values() for panel in panels}
    assert axes == {None, "train/global_step", "train/tokens"}
    for what in ("loss", "perf/tokens", "perf/mfu", "memory/", "comm/", "predicted/memory", "predicted/comm"):
        assert any(what in name for name in drawn), what
    kept = json.loads((folder / "wandb-workspace.json").read_text())
    sections = kept["workspace"]["sections"]
    assert [section["name"] for section in sections] == list(PANELS)
    assert {
        name for section in sections for panel in section["panels"] for name in panel.get("y") or panel["metrics"]
    } == drawn
    assert kept["workspace"]["runset_settings"]["filters"] == "Metric('Group') == 'both'"
    texts = json.dumps(kept["report"]["blocks"])
    assert "zero3: same losses bitwise; 50% less memory; 9% lower peak by formula; 1.4x traffic" in texts


@pytest.mark.slow
def test_the_workspace_is_what_wandb_takes(compared):
    """As far as it can be seen without its server: wandb_workspaces accepts every panel and filter, both ways."""
    view = build_workspace("someone", "shardbook", "mine")
    assert type(view)._from_model(view._to_model()).sections[0].panels[0].y[0].name == "train/loss"
    outcomes = [read_outcome(compared[1] / "ddp", "ddp")]
    report = build_report("someone", "shardbook", "mine", outcomes)
    assert report.title == "Stages: mine" and [type(b).__name__ for b in report.blocks][-2:] == ["H2", "PanelGrid"]


@pytest.mark.slow
def test_another_tracker_gets_the_same(compared):
    folder = compared[1] / "zero3"
    events = EventAccumulator(str(next((folder / "tensorboard").rglob("events.out.tfevents.*")).parent))
    events.Reload()
    shown = [event.value for event in events.Scalars("train/loss")]
    assert shown == pytest.approx(losses(folder), rel=1e-6)
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_the_report_alone_is_made_again(compared, tmp_path, capsys):
    folder = compared[1]
    before = json.loads((folder / "report.json").read_text())
    (folder / "report.json").unlink()
    assert cli.main(["compare", str(folder), "--publish"]) == 0
    # no key here, or no network: said, and nothing stops
    assert "wandb    not published: no key (wandb login, or WANDB_API_KEY); runs and view" in capsys.readouterr().out
    assert json.loads((folder / "report.json").read_text()) == before
    assert cli.main(["compare", str(folder), "--stages", "ddp"]) == 2
    assert "only its report is made anew" in capsys.readouterr().err
    assert cli.main(["compare", str(tmp_path)]) == 2
    assert "none of its 0 variants can be reported" in capsys.readouterr().err


@pytest.mark.parametrize(
    "stages, said",
    [
        ("", "STAGES is empty: name some of ddp, zero1, zero2, zero3, hsdp, zeropp, apart by spaces"),
        ("ddp zero4", "parallel.stage = 'zero4': must be one of ddp, zero1, zero2, zero3, hsdp, zeropp, fsdp; did you"),
        ("ddp ddp", "STAGES names ddp more than once"),
        ("ddp zero3,optim.lr=1", "optim.lr"),
        (
            "ddp,parallel.reshard_min_params=5",
            "variant ddp,parallel.reshard_min_params=5: parallel.reshard_min_params = 5",
        ),
        ("zero3,parallel.dp_shard_size=3", "needs 3 ranks, the world has 2"),
        ("zero3, ddp", "parallel.stage = 'zero3,': must be one of ddp"),
        ("zero3,run.name=mine", "variant zero3,run.name=mine: run.name=mine: a comparison sets that itself"),
        ("zero3,train.logging_steps=0", "train.logging_steps = 0 logs none of 5 steps; a comparison is of logged"),
        ("zero3,train.logging_steps=9", "train.logging_steps = 9 logs none of 5 steps; a comparison is of logged"),
        ("parallel.betas=[8,4],method=ppo", "method = 'ppo'"),
        ("zero4 ddp zero3,optim.lr=1", "; variant zero3,optim.lr=1: optim.lr is not a key"),  # each of them
        ("zero3,optim.lr=1 ddp zero4", "; variant zero4: parallel.stage = 'zero4': must be one of"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(recipe, stages, said, capsys):
    assert cli.main(["compare", str(recipe), "--stages", stages, "--nproc", "2", "run.name=refused"]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1, error
    assert not (recipe.parent / "refused").exists()


@pytest.mark.slow
def test_a_comparison_with_other_settings_is_not_continued(compared, recipe, capsys):
    words = ["--stages", "ddp zero3", "--nproc", "2", "run.name=both", "optim.learning_rate=0.5"]
    assert cli.main(["compare", str(recipe), *words]) == 2
    said = f"{compared[1]}/ddp was run with other settings: optim.learning_rate was 0.003 there, is 0.5 here; choose"
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_comparison_with_other_ranks_or_steps_is_not_continued(compared, recipe, capsys):
    words = ["compare", str(recipe), "--stages", "zero3", "run.name=both"]
    assert cli.main([*words, "--nproc", "1"]) == 2
    said = f"shardbook: {compared[1]}/zero3 was run with other settings: "
    assert capsys.readouterr().err == f"{said}ranks was 2 there, is 1 here; choose another run.name\n"
    assert cli.main([*words, "--nproc", "2", "train.steps=3", "precision.params=bf16"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and "train.steps was 5 there, is 3 here" in error
    assert "precision.params was 'fp32' there, is 'bf16' here" in error


def started(recipe, name, *words):
    command = [BIN / "shardbook", "compare", str(recipe), "--stages", "zero3 ddp", "--nproc", "2", f"run.name={name}"]
    process = subprocess.Popen([*command, "train.steps=100000", *words], stdout=subprocess.PIPE, text=True)
    return process, lambda pid: Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.cold
@pytest.mark.slow
def test_a_signal_before_a_variant_listens_stops_the_comparison(recipe):
    process, children = started(recipe, "early")
    while process.poll() is None and not children(process.pid):
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 75 and "[2/2]" not in said
    assert said.splitlines()[-1] == "stopped  in zero3; continue with run.name=early"


@pytest.mark.slow
class SignalWhenListed(list):
    """The processes of a comparison; a Ctrl-C comes as soon as a variant is one of them."""

    def __setitem__(self, place, value):
        super().__setitem__(place, value)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_signal_while_a_variant_is_started_reaches_it_once(tmp_path, monkeypatch, moment):
    """A second Ctrl-C would end it without saving. The signal comes before or after the variant is listed."""
    from shardbook import compare
    from shardbook.ranks.launch import passing_signals

    signals = []

    class Variant(subprocess.Popen):
        def __init__(self, command, **how):
            super().__init__([sys.executable, "-c", ""], **how)
            if moment == "before":
                os.kill(os.getpid(), signal.SIGINT)

        def poll(self):
            return None

        def send_signal(self, signum):
            signals.append(signum)

    monkeypatch.setattr(compare.subprocess, "Popen", Variant)
    processes = SignalWhenListed() if moment == "after" else []
    with passing_signals(processes) as passed:
        assert compare.run_variant([], tmp_path / "log", "title", processes, *passed) == 0
    assert signals == [signal.SIGINT]


def test_a_second_ctrl_c_stops_the_comparison(recipe):
    process, _ = started(recipe, "twice")
    for line in process.stdout:
        if "  step 2/" in line:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            break
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 75 and "[2/2]" not in said


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"  # nobody may collect an orphan
    except (FileNotFoundError, ProcessLookupError):  # the second: collected between open and read
        return False


@pytest.mark.slow
def test_what_a_killed_comparison_started_ends_too(recipe):
    process, children = started(recipe, "killed", "train.logging_steps=100000")
    while not (trains := children(process.pid)) or len(ranks := children(trains[0])) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    until = time.monotonic() + 240
    while (left := [int(pid) for pid in (*trains, *ranks) if running(pid)]) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.slow
def test_where_every_variant_fails_the_reason_is_not_the_command(recipe):
    result = compare(recipe, "--stages", "ddp", "run.name=diverged", "optim.learning_rate=1e38")
    assert result.returncode == 1 and re.search(r"\[1/1\] ddp  shardbook: step \d: train/loss is", result.stdout)
    assert result.stderr == "shardbook: none of 1 variants finished\n"


def test_no_variant_finished(tmp_path, capsys):
    (tmp_path / "variants.json").write_text('{"ddp": "ddp"}')
    assert cli.main(["compare", str(tmp_path)]) == 2
    assert "none of its 1 variants can be reported; ddp: it ended before its first step" in capsys.readouterr().err
