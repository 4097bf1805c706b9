"""The commands as a user types them: processes, exit codes, the run directory and what other programs read in it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
from tiny import tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from world import losses, metrics, run_train, run_world, train_rank

from shardbook import cli
from shardbook.ranks import machine
from shardbook.ranks.launch import free_port
from shardbook.recipe import RecipeError, load_recipe

pytestmark = pytest.mark.usefixtures("warm_ranks")  # but of what is marked cold
BIN = Path(sys.executable).parent
LAUNCH = Path(__file__).parents[2] / "launch"
STEP_KEYS = {
    "step",
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
    "train/tokens",
    "perf/loader_wait_seconds",
    "perf/step_seconds",
    "perf/tokens_per_second_per_device",
    "memory/params_bytes",
    "memory/grads_bytes",
    "memory/optimizer_bytes",
}
COMM_KEYS = {
    f"comm/{op}_{what}"
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    for what in ("calls", "bytes")
} | {"comm/inter_node_bytes", "comm/sent_bytes"}
AXIS_KEYS = {"comm/dp_shard/all_gather_bytes", "comm/dp_shard/all_reduce_bytes", "comm/dp_shard/reduce_scatter_bytes"}
MEMORY = {f"memory/{kind}_bytes" for kind in ("params", "grads", "optimizer")}
# counted, and said beforehand, once
FIRST_KEYS = COMM_KEYS | AXIS_KEYS | {f"predicted/{key}" for key in COMM_KEYS | AXIS_KEYS | MEMORY}
FIRST_KEYS |= {f"paper/{key}" for key in MEMORY} | {"predicted/memory/peak_bytes"}
PEAK_KEYS = {
    f"predicted/peak/{term}_bytes"
    for term in ("params", "grads", "optimizer", "gathered", "buffers", "activations", "working")
}


def shardbook(*words, **more) -> subprocess.CompletedProcess:
    return subprocess.run([BIN / "shardbook", *words], capture_output=True, text=True, timeout=240, **more)


@pytest.fixture(scope="module")
def first(recipe):
    """`shardbook train` on two ranks, with a checkpoint and an offline wandb run."""
    words = ("train.eval_steps=2", "train.save_steps=3", "train.logging_steps=1", "run.report_to=wandb")
    result = shardbook("train", str(recipe), "run.name=first", *words)
    assert result.returncode == 0, result.stderr
    return recipe.parent / "first", result.stdout


def test_what_a_run_says(first):
    run, out = first
    assert out.splitlines()[0] == f"run      {run}"
    for part in (
        "effective layout",
        "zero3 (ZeRO P_os+g+p)",
        "dp_replicate 1 x dp_shard 2",
        "4; 4 freed in each micro-batch",
        "5 steps",
        "all_gather over dp_shard 214.1 KiB in 7 calls",
        "; as predicted",
    ):
        assert part in out, out
    assert "step 0/5  eval " in out and "step 5/5  loss " in out and "tokens/s a device" in out and "ETA 0:0" in out
    assert out.splitlines()[-1].startswith("done     5 steps")


def test_what_a_run_leaves(first, recipe, tiny):
    run, _ = first
    expected = {"recipe.toml", "resolved.toml", "metrics.jsonl", "checkpoints", "export", "run.json", "wandb", "lock"}
    assert {path.name for path in run.iterdir()} == expected
    assert (run / "recipe.toml").read_text() == recipe.read_text()
    resolved = tomllib.loads((run / "resolved.toml").read_text())
    assert resolved["precision"] == dict.fromkeys(("params", "reduce", "master", "frozen"), "fp32")  # as auto meant
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-000003", "step-000005"]
    facts = json.loads((run / "run.json").read_text())
    assert facts["world_size"] == 2 and facts["mesh"] == {"dp_replicate": 1, "dp_shard": 2}
    assert facts["torch"] == torch.__version__ and facts["finished_steps"] == 5


def test_metrics(first):
    run, _ = first
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert set(rows[0]) == {"step", "eval/loss"}
    assert [("eval/loss" in row) for row in rows] == [True, False, True, False, True, True]
    assert set(rows[1]) == STEP_KEYS | FIRST_KEYS | PEAK_KEYS  # counted on the first step; absent where it was not
    for key in FIRST_KEYS:
        if (
            key.startswith("predicted/") and key != "predicted/memory/peak_bytes"
        ):  # which only a GPU's allocator measures
            assert rows[1][key] == rows[1][key.removeprefix("predicted/")], key
    assert all(set(row) - {"eval/loss"} == STEP_KEYS for row in rows[2:])
    assert rows[1]["predicted/memory/peak_bytes"] == sum(rows[1][key] for key in PEAK_KEYS)
    tokens = [row["train/tokens"] for row in rows[1:]]
    assert tokens == sorted(set(tokens))
    # fp32 over 2 ranks: half each, odd rows padded; AdamW keeps two of them and a step count a tensor
    count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(run / "export").parameters())
    tensors = 1 + 9 * 3 + 1
    padded = rows[1]["memory/params_bytes"]
    assert count * 2 <= padded <= count * 2 + 4 * 32 * tensors
    assert rows[1]["memory/grads_bytes"] == padded
    assert rows[1]["memory/optimizer_bytes"] == 2 * padded + 4 * tensors


def test_wandb_is_recorded_offline(first):
    run, _ = first
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    found = file.read_bytes()  # a log of protobuf records, their strings uncompressed
    for name in (STEP_KEYS | FIRST_KEYS) - {"step"} | {"eval/loss", "train/global_step"}:
        assert name.encode() in found, name


def test_the_export_is_the_trained_model(first, tiny):
    run, _ = first
    model = AutoModelForCausalLM.from_pretrained(run / "export")
    coder = AutoTokenizer.from_pretrained(run / "export")
    prompt = coder.apply_chat_template(
        [{"role": "user", "content": "why"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > prompt["input_ids"].shape[1]
    assert not torch.equal(model.lm_head.weight, AutoModelForCausalLM.from_pretrained(tiny / "model").lm_head.weight)
    assert coder.get_vocab() == tokenizer().get_vocab()


@pytest.mark.slow
def test_export_command_writes_the_same_model_from_a_checkpoint(first, tmp_path, capsys):
    run, _ = first
    result = shardbook("export", str(run), "--out", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    ids = torch.arange(50)[None]
    logits = [AutoModelForCausalLM.from_pretrained(at)(ids).logits for at in (run / "export", tmp_path / "out")]
    assert torch.equal(*logits)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    assert cli.main(["export", str(run), "--out", str(tmp_path / "full")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert (tmp_path / "full" / "precious").exists()
    earlier = str(run / "checkpoints/step-000003")
    assert run_world(1, cli.main, ["export", str(run), "--checkpoint", earlier, "--out", str(tmp_path / "3")]) == [0]
    assert not torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "3")(ids).logits, logits[0])


@pytest.mark.slow
def test_the_export_has_the_template_that_was_trained_with(recipe, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("{{ greeting }}" + tokenizer().chat_template)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "a", "output": "b"}\n' * 4)
    words = [f"data.chat_template={template}", f"data.train={rows}", "data.chat_template_kwargs.greeting=Hi!"]
    run = run_train(1, recipe, "template", "train.steps=1", "train.save_steps=1", *words)
    assert run_world(1, cli.main, ["export", str(run), "--out", str(tmp_path / "out")]) == [0]
    for folder in (run / "export", tmp_path / "out"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == template.read_text()


def test_export_refuses_what_is_no_run(tmp_path, first, capsys):
    assert cli.main(["export", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
    assert cli.main(["export", str(first[0]), "--checkpoint", str(tmp_path / "step-000009")]) == 2
    assert "incomplete or not a checkpoint" in capsys.readouterr().err


def test_export_does_not_pass_an_older_checkpoint_for_the_result(first, tmp_path, capsys):
    run = tmp_path / "copy"
    shutil.copytree(first[0], run)
    shutil.rmtree(run / "checkpoints" / "step-000005")
    assert cli.main(["export", str(run)]) == 2
    assert "newest checkpoint is step-000003; the result of its 5 steps is in" in capsys.readouterr().err


@pytest.mark.slow
def test_a_refused_continuation_changes_nothing(first):
    run = first[0]
    before = {name: (run / name).read_bytes() for name in ("recipe.toml", "resolved.toml", "run.json", "metrics.jsonl")}
    result = shardbook("train", str(run / "recipe.toml"), "run.name=first", "train.steps=9", "model.path=./nowhere")
    assert result.returncode == 2 and "./nowhere" in result.stderr
    assert {name: (run / name).read_bytes() for name in before} == before


@pytest.mark.cold
def test_a_signal_before_the_first_step_is_one_line(recipe):
    words = ["train", str(recipe), "run.name=early"]
    process = subprocess.Popen([BIN / "shardbook", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 2 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 75 and "Traceback" not in err
    # the launcher's line, or rank 0's where both ranks listened already
    said = (err or out).strip().splitlines()[-1].removeprefix("shardbook: ")
    assert re.fullmatch("stopped +before (the first step|anything was built); run the same command again", said)


@pytest.mark.slow
def test_the_resolved_recipe_repeats_the_run(first, recipe):
    run, _ = first
    result = shardbook("train", str(run / "resolved.toml"), "run.name=repeat", "run.report_to=none")
    assert result.returncode == 0, result.stderr
    assert losses(recipe.parent / "repeat") == losses(run)


@pytest.mark.cold
@pytest.mark.slow
def test_accelerate_starts_it_too(first, recipe, tmp_path):
    """torchrun too, which is what accelerate starts. test-cluster has all launchers, over two nodes."""
    command = [BIN / "accelerate", "launch", "--config_file", LAUNCH / "accelerate/single-node.yaml"]
    command += ["--num_processes=2", "-m", "shardbook.train", recipe, "train.steps=2", "run.name=accelerate"]
    environment = os.environ | {"SHARDBOOK_EXIT_FILE": str(tmp_path / "codes")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 0, result.stderr
    assert "following values were not passed" not in result.stderr  # the file names what accelerate would warn of
    assert losses(recipe.parent / "accelerate") == losses(first[0])[:2]
    assert (tmp_path / "codes").read_text() == "0\n0\n"


@pytest.mark.slow  # in make test: before the first step, above, and in mid-step, in tests/dist/test_resume.py
def test_a_signal_to_the_command_saves_and_exits_75_and_the_same_command_continues(first, recipe):
    words = ["train", str(recipe), "run.name=signals", "train.save_steps=0"]
    done = 0
    for signum in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen([BIN / "shardbook", *words, "train.steps=100000"], stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if line.startswith(f"step {done + 2}/"):
                process.send_signal(signum)
                break
        rest = process.stdout.read()
        assert process.wait(240) == 75, rest
        assert "checkpoint saved" in rest
        before, done = done, len(losses(recipe.parent / "signals"))
        assert done >= before + 2
    result = shardbook(*words, f"train.steps={done + 1}")
    assert result.returncode == 0 and f"at step {done} of {done + 1}" in result.stdout
    assert losses(recipe.parent / "signals")[:5] == losses(first[0])[: done + 1][:5]


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_the_same_command_continues_bitwise(first, recipe):
    words = ["train", str(recipe), "run.name=killed", "train.save_steps=2", "train.steps=11", "run.report_to=none"]
    process = subprocess.Popen([BIN / "shardbook", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for line in process.stdout:
        if line.startswith("step 3/"):
            os.kill(int(children.read_text().split()[1]), signal.SIGKILL)
            break
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith(
        "shardbook: run failed: rank 1 was ended by SIGKILL; the kernel does so when memory runs out"
    )
    assert last.endswith("; the same command with this run's run.name goes on from its newest checkpoint")
    assert shardbook(*words).returncode == 0
    assert losses(recipe.parent / "killed")[:5] == losses(first[0])


LAUNCHERS = {
    "shardbook": [BIN / "shardbook", "train", "--max-restarts", "3"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"),
        *("--standalone", "-m", "shardbook.train"),
    ],
}


ELEVEN = ("train.save_steps=2", "train.steps=11", "run.report_to=none")


@pytest.fixture(scope="module")
def straight(recipe):
    result = shardbook("train", str(recipe), "run.name=straight", *ELEVEN)
    assert result.returncode == 0, result.stderr
    return recipe.parent / "straight"


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=[pytest.mark.cold] * (name == "torchrun")) for name in LAUNCHERS]
)
def test_a_run_whose_ranks_are_killed_twice_ends_as_the_straight_one(straight, recipe, launcher):
    """Either rank, once before and once after a checkpoint; the launcher starts them again by itself."""
    words = [recipe, f"run.name=again-{launcher}", *ELEVEN]
    process = subprocess.Popen(
        [*LAUNCHERS[launcher], *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    children, kills = Path(f"/proc/{process.pid}/task/{process.pid}/children"), {"step 3/": 1, "step 8/": 0}
    for line in process.stdout:
        if (at := line[: len("step 3/")]) in kills:
            os.kill(int(children.read_text().split()[kills.pop(at)]), signal.SIGKILL)
    assert process.wait(240) == 0 and not kills, process.stderr.read()
    again, wanted = (
        [(row["step"], row.get("train/loss"), row.get("train/grad_norm")) for row in metrics(run)]
        for run in (recipe.parent / f"again-{launcher}", straight)
    )
    assert again == wanted and len(again) == 12


def on_two_nodes(recipe, name, *words, stop=None, signum=signal.SIGTERM):
    """`shardbook train` as two machines would start it, one rank each. `stop`: the node whose launcher gets `signum`
    once the third step is logged. Returns exit codes and standard errors."""
    head = ("--head", f"127.0.0.1:{free_port()}", "--nproc", "1", "--nodes", "2")
    command = [BIN / "shardbook", "train", str(recipe), f"run.name={name}", *words, *head]
    nodes = [
        subprocess.Popen(
            [*command, "--node-rank", str(node)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for node in (0, 1)
    ]
    if stop is not None:
        log, deadline = recipe.parent / name / "metrics.jsonl", time.monotonic() + 240
        while not (log.exists() and '"step": 3' in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        nodes[stop].send_signal(signum)
    errors = [node.communicate(timeout=240)[1] for node in nodes]
    return [node.returncode for node in nodes], errors


@pytest.mark.slow
def test_a_ctrl_c_that_ends_the_reader_too_saves(recipe):
    """`shardbook train ... | tee log`: the terminal's Ctrl-C goes to both."""
    words = ["train", str(recipe), "run.name=piped", "train.steps=100000", "train.save_steps=0"]
    process = subprocess.Popen([BIN / "shardbook", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    error = process.stderr.read()
    assert process.wait(240) == 75, error
    assert list((recipe.parent / "piped" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_node_whose_launcher_is_killed_ends_the_other_with_one_line(recipe):
    codes, errors = on_two_nodes(recipe, "killed-node", "train.steps=100000", stop=1, signum=signal.SIGKILL)
    assert codes == [1, -signal.SIGKILL]
    said = (
        r"shardbook: run failed: rank 1 \(host \S+\) ended: what started this process was killed; run the same command "
    )
    assert re.fullmatch(said + "again\n", errors[0]), errors


@pytest.mark.cold
@pytest.mark.slow
def test_two_nodes_compute_what_one_does(first, recipe):
    codes, errors = on_two_nodes(recipe, "two-nodes", "train.eval_steps=2")
    assert codes == [0, 0], errors
    assert losses(recipe.parent / "two-nodes") == losses(first[0])


@pytest.mark.slow
def test_a_signal_to_one_node_stops_both_and_the_same_command_continues(first, recipe):
    words = ("train.eval_steps=2", "train.steps=200", "optim.lr_scheduler_type=constant", "train.export=false")
    codes, errors = on_two_nodes(recipe, "preempted-node", *words, stop=1)
    assert codes == [75, 75], errors
    done = len(losses(recipe.parent / "preempted-node"))
    assert 3 <= done < 200
    codes, errors = on_two_nodes(recipe, "preempted-node", *words[:1], f"train.steps={done + 2}", *words[2:])
    assert codes == [0, 0], errors
    assert len(losses(recipe.parent / "preempted-node")) == done + 2


@pytest.mark.parametrize(
    "words, said",
    [
        (["--nodes", "2"], "--nodes 2: needs --head"),
        (["--nodes", "2", "--head", "here", "--node-rank", "2"], "--node-rank 2: must be from 0 to 1"),
        (["--nodes", "0", "--head", "here"], "--nodes 0: must be at least 1"),
        (["--nodes", "2", "--head", "here:there"], "--head here:there: must be a host or host:port"),
        (["--nodes", "2", "--head", "::1"], "--head ::1: must be a host or host:port"),
        (["--nodes", "2", "--head", "[::1]:29500"], "--head [::1]:29500: must be a host or host:port"),
        (
            ["--nodes", "2", "--head", "here:70000"],
            "--head here:70000: must be a host or host:port, with a port from 1",
        ),
        (
            ["--nodes", "3", "--head", "here", "parallel.dp_shard_size=4"],
            "4 ranks, which 3 machines cannot share evenly",
        ),
    ],
)
def test_wrong_nodes_are_refused(words, said, recipe, capsys):
    assert cli.main(["train", str(recipe), *words]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.cold
@pytest.mark.slow
def test_exit_codes_of_ranks_come_through(recipe):
    started = shardbook("train", str(recipe), "data.max_length=300")
    assert started.returncode == 2
    assert started.stderr.strip().splitlines()[-1].startswith("shardbook: data.max_length = 300")
    assert started.stderr.count("shardbook: ") == 1  # every rank met it, one spoke


def test_ranks_of_a_fixed_mesh(recipe):
    def chosen(*words):
        return machine.choose_nproc(load_recipe(recipe, list(words)).parallel)

    assert chosen() == (torch.cuda.device_count() or 2)
    assert chosen("parallel.dp_shard_size=1") == 1
    if not torch.cuda.is_available():
        assert chosen("parallel.ep_size=4") == 4 and chosen("parallel.ep_size=2", "parallel.pp_size=2") == 4
    with pytest.raises(RecipeError, match="needs 4096 ranks and this machine has room for"):
        chosen("parallel.stage=hsdp", "parallel.dp_replicate_size=64", "parallel.dp_shard_size=64")


def test_more_ranks_than_fit_into_memory_are_refused_before_one_is_started(recipe, capsys, monkeypatch):
    """Where none fits, so that the test asks for two: what is not refused as it should be fills no machine."""
    monkeypatch.setattr("shardbook.ranks.machine.RANK_BYTES", 1 << 60)
    for name in ("shardbook.ranks.launch.launch_ranks", "shardbook.compare.compare"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("ranks were started"))
    for words in (["train", str(recipe)], ["compare", str(recipe), "--stages", "ddp"]):
        assert cli.main([*words, "--nproc", "2"]) == 2
        said = capsys.readouterr().err
        assert re.search(r"^shardbook: --nproc 2: must be at most 0 here: so many fill \d+ GB before", said)


def test_a_machine_that_cannot_run_it_says_so_before_a_rank_is_started(capsys, monkeypatch):
    """Its mesh would want 512 of them."""
    monkeypatch.setattr("shardbook.ranks.launch.launch_ranks", lambda *_: pytest.fail("ranks were started"))
    assert cli.main(["train", "llama405b-3d", "hardware.memory_gb=1129000000"]) == 2
    result = capsys.readouterr()
    assert not result.out
    assert re.fullmatch(
        r"shardbook: llama405b-3d needs 1,129,000,000 GB for its state, and this machine has (no|\d+) GPUs?[^;]* GB of "
        r"memory; what it takes on how many GPUs: make plan RECIPE=llama405b-3d GPUS=14112504 GPU=h100-80gb; on a "
        r"cluster, on each machine: make launch NODES=1764063 NODE_RANK=0 HEAD=first-machine RECIPE=llama405b-3d; "
        r"hardware.memory_gb=0 tries nevertheless\n",
        result.err,
    )


def test_a_step_that_this_machine_has_no_memory_for_is_refused_before_a_model_is_asked_for():
    """On rank 0, so under each launcher: the model is of a hub that no test reaches."""
    words = ["llama70b-fsdp", "hardware.memory_gb=0.001", "data.train=chitchat"]
    for code, out, err in run_world(2, train_rank, words):
        assert code == 2 and not out
        step = r"shardbook: a step of llama70b-fsdp takes \d+ GB on each of 2 ranks at its peak, and each has \d+ GB"
        assert re.match(step + " here; what it takes on how many GPUs: make plan RECIPE=llama70b-fsdp GPUS=8 ", err), (
            err
        )


def test_a_dry_run_checks_a_recipe_at_its_world_size(recipe, capsys):
    before, hsdp = set(recipe.parent.iterdir()), ["parallel.stage=hsdp", "parallel.dp_shard_size=4"]
    assert cli.main(["train", str(recipe), "--dry-run", "--nproc", "4", "--nodes", "2", *hsdp]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "dry run  as on 8 GPUs, which compute in bf16 where precision.params is auto; a CPU's in fp32"
    )
    assert "dp_replicate 2 x dp_shard 4" in said and "a step   on fake tensors: " in said and "dry run  done" in said
    assert cli.main(["train", str(recipe), "--dry-run", "--nproc", "2", "--nodes", "2", "parallel.tp_size=4"]) == 0
    said = capsys.readouterr().out
    assert "4 ranks share matrices" in said and "slow: a node has 2 ranks" in said and "dry run  done" in said
    assert cli.main(["train", str(recipe), "--dry-run", "--nproc", "3", "parallel.dp_shard_size=2"]) == 2
    for words, said in (
        (["data.train=/nowhere.jsonl"], "data.train = '/nowhere.jsonl': no such file"),
        (["--nodes", "0"], "--nodes 0: must be at least 1"),
        (["--nodes", "-1"], "--nodes -1: must be at least 1"),
    ):
        assert cli.main(["train", str(recipe), "--dry-run", *words]) == 2, words
        assert said in capsys.readouterr().err, words
    assert cli.main(["train", str(recipe), "--dry-run", "generate.steps=1", "generate.max_new_tokens=200"]) == 0
    assert "samples  0 in place of 4: no more of the first 1,000 rows leave room" in capsys.readouterr().out
    assert set(recipe.parent.iterdir()) == before  # no run directory


@pytest.mark.slow
def test_a_default_name_says_recipe_and_time(recipe):
    before = set(recipe.parent.glob("tiny-2*"))
    result = shardbook(
        "train", str(recipe), "train.steps=1", "train.logging_steps=0", "train.export=false", "--nproc", "1"
    )
    assert result.returncode == 0, result.stderr
    (run,) = set(recipe.parent.glob("tiny-2*")) - before
    assert not (run / "export").exists() and [row["step"] for row in metrics(run)] == [0, 1]
    assert "train/loss" not in metrics(run)[1]  # logging is off; the evaluation at the end is still there


@pytest.mark.cold
def test_a_rank_that_fails_alone_ends_the_others_at_once(tmp_path):
    """Rank 0 would wait for hours; the launcher must not."""
    (tmp_path / "shardbook").mkdir()
    (tmp_path / "shardbook" / "__init__.py").touch()
    program = "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(2)\ntime.sleep(10_000)\n"
    (tmp_path / "shardbook" / "train.py").write_text(program)
    code = f"import sys; from shardbook.ranks.launch import launch_ranks; import os; os.chdir({str(tmp_path)!r}); "
    code += f"os.environ['PYTHONPATH'] = {str(tmp_path)!r}; sys.exit(launch_ranks(2, []))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 2


def test_help_and_wrong_commands():
    result = shardbook("train", "--help")
    assert result.returncode == 0 and "optim.learning_rate = 2e-05" in result.stdout
    assert shardbook("recipes").returncode == 0
    assert shardbook("nonsense").returncode == 2
    environment = os.environ | {"COLUMNS": "80"}
    assert shardbook(env=environment).returncode == 2
