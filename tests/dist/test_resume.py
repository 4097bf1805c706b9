"""A run that stops goes on as if it had not: bitwise in the same world, to 1e-6 in another world or stage."""

import json
import os
import re
import shutil
from datetime import date

import pytest
import torch
from planted import replace
from safetensors.torch import load_file
from tiny import CHATML
from world import losses, metrics, run_train, run_world, train_rank

from shardbook.run import directory
from shardbook.run.checkpoint.format import MANIFEST, newest_checkpoint

SAVING = ("train.steps=6", "train.save_steps=2", "optim.warmup_steps=2", "optim.lr_scheduler_type=linear")


@pytest.fixture(scope="module")
def straight(recipe):
    """Six steps without a stop, on 2 ranks with zero3; checkpoints at 2, 4 and 6."""
    return run_train(2, recipe, "straight", *SAVING)


def weights(run):
    return load_file(run / "export" / "model.safetensors")


def cut_back(straight, name, step):
    """A copy of the straight run as it was on disk just after `step`, with what a dying run may leave behind."""
    run = straight.parent / name
    shutil.copytree(straight, run, ignore=shutil.ignore_patterns("export", f"step-00000{step + 2}"))
    for later in (run / "checkpoints").iterdir():
        if later.is_dir() and int(later.name[5:]) > step:
            shutil.rmtree(later)
    (run / "run.json").unlink()
    half = run / "checkpoints" / f"tmp-00000{step + 2}-0a1b2c3d"
    shutil.copytree(straight / "checkpoints" / f"step-00000{step + 2}", half)
    (half / MANIFEST).unlink()
    (half / "rank-0.bin").write_bytes(b"cut off")
    return run


@pytest.mark.parametrize("step", [2, 4])  # the second was saved by the plan of the first
def test_the_same_world_continues_bitwise(recipe, straight, step):
    run = cut_back(straight, name := f"again-{step}", step)
    assert newest_checkpoint(run / "checkpoints").name == f"step-00000{step}"
    run_train(2, recipe, name, *SAVING)
    assert losses(run) == losses(straight)
    assert [row["step"] for row in metrics(run)] == [row["step"] for row in metrics(straight)]
    last, expected = metrics(run)[-1], metrics(straight)[-1]
    assert {k: v for k, v in last.items() if "perf" not in k} == {k: v for k, v in expected.items() if "perf" not in k}
    mine, theirs = weights(run), weights(straight)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_another_flash_attention_is_said(recipe, straight):
    """One line at the resume, none where it is the same; the next checkpoint holds the new name."""
    run = cut_back(straight, "flash", 4)
    first = json.loads((run / "checkpoints" / "step-000004" / "state.json").read_text())
    assert first["flash_attention"] == "FA2"
    (code, printed, _), _ = run_world(2, by_fa3, [str(recipe), "run.name=flash", *SAVING])
    line = f"warning  checkpoint {run}/checkpoints/step-000004: flash attention ran by FA2 there, runs by FA3 here"
    assert code == 0 and printed.count("flash attention") == 1 and line in printed
    second = json.loads((run / "checkpoints" / "step-000006" / "state.json").read_text())
    assert second["flash_attention"] == "FA3"


def by_fa3(words):
    """A rank on which torch's flash attention is FA3, as facts have it; what a CPU computes is the same."""
    from shardbook.run.checkpoint import load, save

    save.current_flash = load.current_flash = lambda: "FA3"
    return train_rank(words)


def test_rows_that_are_gone_are_said(recipe, straight):
    """A disk that lost the end of metrics.jsonl, though a save had made it durable; and what is there is not said."""
    run = cut_back(straight, "torn", 4)
    kept = "".join(json.dumps(row) + "\n" for row in metrics(straight) if row["step"] <= 4)
    state = json.loads((run / "checkpoints" / "step-000004" / "state.json").read_text())
    assert state["log"] == {"metrics": len(kept)}
    (run / "metrics.jsonl").write_text(kept[:-9])
    lost = len(kept.splitlines(keepends=True)[-1])
    for name, said in (("torn", f"{lost:,} of {len(kept):,} bytes are gone since step 4 was saved"), ("named", "")):
        words = [
            f"run.name={name}",
            *SAVING,
            *[f"train.resume_from_checkpoint={run}/checkpoints/step-000004"] * (not said),
        ]
        (code, printed, _), _ = run_world(2, train_rank, [str(recipe), *words])
        assert code == 0 and said in printed and ("bytes are gone" in printed) == bool(said), printed


def on_unlike_days(words):
    """Each rank is on a day of its own, none of them today."""
    day = date(2024, 5, 1 + int(os.environ["RANK"]))
    directory.date = type("Clock", (date,), {"today": classmethod(lambda _: day)})
    return train_rank(words)


def test_a_template_reads_the_day_on_which_the_run_began(recipe, tmp_path):
    """On every rank, and after a restart on another day; with that day named, a straight run has the same losses."""
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d %B %Y') }}" + CHATML)
    words = [f"data.chat_template={tmp_path}/dated.jinja", "train.save_steps=2", "train.steps="]
    for name, target, steps in (("dated", on_unlike_days, 2), ("dated", train_rank, 4), ("today", train_rank, 4)):
        more = ["data.chat_template_date=2024-05-01"] * (name == "today")
        results = run_world(2, target, [str(recipe), f"run.name={name}", *more, *words[:-1], f"train.steps={steps}"])
        assert [code for code, _, _ in results] == [0, 0], results
        assert "reads the clock, which stands at 2024-05-01 (data.chat_template_date)" in results[0][1]
    run, straight = recipe.parent / "dated", recipe.parent / "today"
    assert losses(run) == losses(straight) and len(losses(run)) == 4
    assert 'chat_template_date = "2024-05-01"' in (run / "resolved.toml").read_text()


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (1, ["train.gradient_accumulation_steps=2"]),
        pytest.param(2, ["parallel.stage=ddp"], marks=pytest.mark.slow),
        (2, ["parallel.stage=zero1", "train.compile=false"]),
        (4, ["parallel.stage=hsdp", "parallel.dp_shard_size=2", "train.gradient_accumulation_steps=1"]),
    ],
    ids=["one-rank", "ddp", "zero1", "hsdp-2x2"],
)
def test_another_world_or_stage_continues(recipe, straight, world, words):
    name = f"to-{world}-" + words[0].rpartition("=")[2]
    run = cut_back(straight, name, 4)
    run_train(world, recipe, name, *SAVING, *words)
    if world <= 2:  # the same rows in each step
        assert losses(run) == pytest.approx(losses(straight), rel=1e-6)
        mine, theirs = weights(run), weights(straight)
        for tensor in theirs:
            assert ((mine[tensor] - theirs[tensor]).norm() / theirs[tensor].norm()).item() < 1e-6, tensor
    else:  # twice the rows in a step: other losses, but from the same weights and the next unseen rows
        assert losses(run)[:4] == losses(straight)[:4]
        assert metrics(run)[-1]["train/tokens"] > metrics(straight)[-1]["train/tokens"]


def test_what_is_saved_is_needed(recipe, straight):
    """Planted bugs: a resume that loses the optimizer's moments, or the loader's place, or takes micro-batches that lay
    ready before it, does not pass the first test."""
    for loss in (lose_moments, lose_place, take_a_stale_step):
        run = cut_back(straight, loss.__name__, 2)
        results = run_world(2, loss, [str(recipe), f"run.name={loss.__name__}", *SAVING])
        assert [code for code, _, _ in results] == [0, 0]
        assert losses(run)[:2] == losses(straight)[:2] and losses(run)[2:] != losses(straight)[2:]


def lose_moments(words):
    from shardbook.run.checkpoint.load import ItemReader

    def read(reader, tensors):
        before(reader, {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")})

    before, ItemReader.read = ItemReader.read, read
    return train_rank(words)


def lose_place(words):
    from shardbook.data.loader import Loader

    Loader.load_state_dict = lambda self, state: None
    return train_rank(words)


def take_a_stale_step(words):
    from shardbook.data.loader import Loader

    real, made = Loader.step_at, []

    def step_at(loader, start):
        made.append(start)
        return real(loader, start if made[1:] else 0)

    Loader.step_at = step_at
    return train_rank(words)


def stop_after_step_3(rank_that_is_told, words):
    """SIGTERM to one rank in the middle of step 3; both must finish that step, save, and leave with 75."""
    import signal

    from shardbook.optim.clip import clip_gradients

    calls = []

    def clip(parameters, limit):
        calls.append(1)
        if len(calls) == 3 and int(os.environ["RANK"]) == rank_that_is_told:
            os.kill(os.getpid(), signal.SIGTERM)
        return clip_gradients(parameters, limit)

    replace(clip_gradients, clip)
    return train_rank(words)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_preempted_in_mid_step_then_continued_bitwise(recipe, straight, rank):
    name = f"preempted-{rank}"
    words = [str(recipe), f"run.name={name}", *SAVING]
    results = run_world(2, stop_after_step_3, rank, words)
    assert [code for code, _, _ in results] == [75, 75], results
    assert "checkpoint saved; continue with run.name=" + name in results[0][1]
    run = recipe.parent / name
    assert newest_checkpoint(run / "checkpoints").name == "step-000003"
    assert not (run / "export").exists()
    run_train(2, recipe, name, *SAVING)
    assert losses(run) == losses(straight)
    assert all(torch.equal(weights(run)[k], v) for k, v in weights(straight).items())


def stop_in_a_long_phase(place, number, rank_that_is_told, words):
    """SIGTERM to one rank in the middle of the `number`th evaluation, samples or save."""
    import signal

    from shardbook.run.checkpoint import save
    from shardbook.run.eval import observer
    from shardbook.run.eval.generate import Generation

    owner, name = {
        "samples": (Generation, "_continue"),
        "evaluate": (observer, place),
        "save_checkpoint": (save, place),
    }[place]
    before, calls = getattr(owner, name), []

    def inside(*given):
        calls.append(1)
        if len(calls) == number and int(os.environ["RANK"]) == rank_that_is_told:
            os.kill(os.getpid(), signal.SIGTERM)
        return before(*given)

    setattr(owner, name, inside)
    return train_rank(words)


@pytest.mark.parametrize(
    ("place", "number", "step"),
    [
        ("evaluate", 1, 0),  # before the first step
        pytest.param("evaluate", 2, 3, marks=pytest.mark.slow),
        pytest.param("samples", 2, 3, marks=pytest.mark.slow),
        pytest.param("save_checkpoint", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_a_long_phase_ends_the_run_after_it(recipe, straight, place, number, step):
    """Without another step, although its counts are on their way by then; then continued bitwise."""
    name = f"stopped-in-{place}-{step}"
    more = (
        "data.eval_size=4",
        "train.eval_steps=3",
        *(("generate.steps=3", "generate.max_new_tokens=3") * (place == "samples")),
    )
    words = [str(recipe), f"run.name={name}", *SAVING, *more]
    results = run_world(2, stop_in_a_long_phase, place, number, 1, words)
    assert [code for code, _, _ in results] == [75, 75], results
    run = recipe.parent / name
    assert [row["step"] for row in metrics(run)] == list(range(step + 1))
    newest = newest_checkpoint(run / "checkpoints")
    assert (newest.name if newest else "") == (f"step-00000{step}" if step else "")
    run_train(2, recipe, name, *SAVING, *more)
    whole = run_train(2, recipe, f"whole-{place}-{step}", *SAVING, *more)
    assert losses(run) == losses(whole)
    assert all(torch.equal(weights(run)[k], v) for k, v in weights(whole).items())


def test_limit_keeps_the_newest(recipe, straight):
    run = run_train(2, recipe, "limited", *SAVING, "train.save_total_limit=2")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000004", "step-000006"]


def test_starting_from_a_named_checkpoint(recipe, straight):
    named, home = "train.resume_from_checkpoint=~/checkpoints/step-000004", {"HOME": str(straight)}
    run = run_train(2, recipe, "branch", *SAVING, named, environment=home)
    assert losses(run) == losses(straight)[4:]


def test_residuals_of_error_feedback_are_not_lost_in_silence(recipe, straight):
    words = ["train.save_steps=0", "train.steps=5", f"train.resume_from_checkpoint={straight}/checkpoints/step-000004"]
    results = run_world(2, from_residuals, [str(recipe), "run.name=residuals", *words])
    assert [code for code, _, _ in results] == [0, 0], results
    assert "warning  begun anew: residuals of error feedback: none are kept now\n" in results[0][1]


def from_residuals(words):
    """A rank whose checkpoint holds what versions with error feedback kept."""
    from shardbook.run.checkpoint import load

    real = load.check_checkpoint

    def of_before(*given):
        stored, state = real(*given)
        stored.state["residual"] = ["blocks.0"]
        return stored, state

    load.check_checkpoint = of_before
    return train_rank(words)


def test_the_recipe_rules_over_what_the_checkpoint_says_of_the_optimizer(recipe, straight):
    source = straight / "checkpoints" / "step-000004"
    words = ("train.save_steps=0", f"train.resume_from_checkpoint={source}")
    plain = run_train(2, recipe, "decay-same", "train.steps=6", *words)
    heavy = run_train(2, recipe, "decay-heavy", "train.steps=6", "optim.weight_decay=30.0", *words)
    assert losses(plain)[0] == losses(heavy)[0] and losses(plain)[1] != losses(heavy)[1]


def refused(recipe, world, name, *words):
    results = run_world(world, train_rank, [str(recipe), f"run.name={name}", *words])
    assert [code for code, _, _ in results] == [2] * world, results
    return results[0][2]


def test_checkpoints_that_do_not_fit_are_refused(recipe, straight, tiny):
    named = f"train.resume_from_checkpoint={straight}/checkpoints"
    assert "step-000099': no such directory" in refused(recipe, 1, "no-1", f"{named}/step-000099")
    assert "damaged (manifest.json: No such file" in refused(recipe, 1, "no-3", f"{named}")
    error = refused(recipe, 2, "no-2", f"{named}/step-000004", f"model.path={tiny}/untied")
    assert "is of another model" in error and "lm_head.weight: absent there, [287, 32] here" in error


@pytest.mark.parametrize(
    "file, damage",
    [
        ("rank-1.bin", lambda data: data[: len(data) // 2]),
        pytest.param("manifest.json", lambda data: b"nonsense", marks=pytest.mark.slow),
        pytest.param("state.json", lambda data: b"{}", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_named(recipe, straight, tmp_path, file, damage):
    copy = tmp_path / "step-000004"
    shutil.copytree(straight / "checkpoints" / "step-000004", copy)
    data = (copy / file).read_bytes()
    (copy / file).unlink()
    if damage:
        (copy / file).write_bytes(damage(data))
    error = refused(recipe, 2, f"damaged-{tmp_path.name}", f"train.resume_from_checkpoint={copy}")
    last = error.splitlines()[-1]  # torch may log above it what it met
    assert last.startswith(f"shardbook: checkpoint {copy}: damaged (")
    assert last.endswith("); name another one")


@pytest.mark.parametrize(
    "words",
    [["train.resume_from_checkpoint={}"], SAVING, [*SAVING, "train.async_save=false"]],
    ids=["load", "save", "save at once"],
)
def test_out_of_memory_on_another_rank_is_explained_and_no_checkpoint_blamed(recipe, straight, words):
    """On rank 1, where it reads, lists or writes its items: both ranks raise it."""
    source = straight / "checkpoints" / "step-000004"
    words = [word.format(source) for word in words]
    name, alone = f"no-memory-{len(words)}", ("run.lost_seconds=0", "run.hang_seconds=0")  # nor by the heartbeat, first
    for code, _, errors in run_world(2, without_memory, [str(recipe), f"run.name={name}", *words, *alone]):
        assert code == 1
        last = errors.splitlines()[-1]
        assert last.startswith("shardbook: out of memory: CUDA out of memory. Tried to allocate 2 GiB. Predicted"), last
        assert "damaged" not in errors and "cannot be written" not in errors


def without_memory(words):
    import torch.distributed as dist

    from shardbook.run.checkpoint import save
    from shardbook.run.checkpoint.load import ItemReader

    def refuse(real, *given):
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return real(*given)

    for owner, name in (
        (ItemReader, "read"),
        (save, "write_finite") if "train.async_save=false" in words else (save, "assign_writes"),
    ):
        setattr(owner, name, wraps(refuse, getattr(owner, name)))
    return train_rank(words)


def wraps(refuse, real):
    return lambda *given: refuse(real, *given)


def test_a_checkpoint_of_an_earlier_version_is_refused(recipe, straight, tmp_path):
    """Named by the recipe, and as the run's newest: the run neither begins anew beside it nor goes back behind it."""
    run = recipe.parent / "earlier"
    shutil.copytree(straight, run, ignore=shutil.ignore_patterns("step-000006"))
    for copy, name, words in (
        (tmp_path / "step-000004", f"named-{tmp_path.name}", [f"train.resume_from_checkpoint={tmp_path}/step-000004"]),
        (run / "checkpoints" / "step-000006", "earlier", [*SAVING, "train.steps=8"]),
    ):
        copy.mkdir()
        for file in ("__0_0.distcp", "__1_0.distcp", ".metadata", "state.json", "COMPLETE"):
            (copy / file).touch()
        error = refused(recipe, 2, name, *words)
        assert f"checkpoint {copy}: of an earlier version (0.1, or 0.2 before its release" in error.splitlines()[-1]


def test_weights_that_are_not_finite_are_not_saved_where_nothing_was_logged(recipe):
    words = [str(recipe), "run.name=broken", *SAVING, "train.save_steps=0", "train.logging_steps=0"]
    words += ["optim.learning_rate=1e30", "data.eval_size=0", "train.eval_steps=0"]
    for code, _, errors in run_world(2, stop_after_step_3, 0, words):
        line = r"step 2: train/loss is 5\.\d+ and train/grad_norm nan; lower"
        assert code == 1 and re.search(line, errors), errors
    assert newest_checkpoint(recipe.parent / "broken" / "checkpoints") is None


@pytest.mark.parametrize("place", ["tensors", pytest.param("state", marks=pytest.mark.slow)])
def test_a_disk_that_is_full_is_said(recipe, place):
    alone = ("run.lost_seconds=0", "run.hang_seconds=0")  # nobody ends the other rank from outside
    words = [str(recipe), f"run.name=full-{place}", *SAVING, *alone]
    (code, _, errors), other = run_world(2, save_to_a_full_disk, place, words)
    assert code == 1 and "cannot be written (OSError: [Errno 28] No space left on device" in errors, errors
    assert other[0] == 1


def save_to_a_full_disk(place, words):
    from shardbook.run.checkpoint import save

    def full(*anything, **named):
        raise OSError(28, "No space left on device")

    setattr(save, {"tensors": "assign_writes", "state": "state_facts"}[place], full)
    return train_rank(words)


def test_stopped_before_its_first_step_a_run_that_began_with_anothers_checkpoint_has_none(recipe, straight):
    named = f"train.resume_from_checkpoint={straight}/checkpoints/step-000004"
    for code, said, _ in run_world(2, stop_at_once, [str(recipe), "run.name=none-yet", *SAVING, named]):
        assert code == 75
        assert not said or "stopped  before its first step; continue with run.name=none-yet" in said
    assert newest_checkpoint(recipe.parent / "none-yet" / "checkpoints") is None
    run = run_train(2, recipe, "none-yet", *SAVING, named)
    assert losses(run) == losses(straight)[4:]


def stop_at_once(words):
    """SIGTERM to each rank when its weights are there."""
    import signal

    from shardbook.run.start import start_from

    def start_and_stop(*given):
        started = start_from(*given)
        os.kill(os.getpid(), signal.SIGTERM)
        return started

    replace(start_from, start_and_stop)
    return train_rank(words)


def test_a_checkpoint_past_the_end_or_of_other_rows_is_refused(recipe, straight):
    named = f"train.resume_from_checkpoint={straight}/checkpoints/step-000004"
    assert "is at step 4, the recipe ends at step 3" in refused(recipe, 2, "no-3", named, "train.steps=3")
    assert "rows and seed 42, this recipe has" in refused(recipe, 2, "no-4", named, "data.max_length=100")
    assert "seed 42, this recipe has" in refused(recipe, 2, "no-5", named, "train.seed=1")
    # epochs count steps, which were of other rows
    wider = "train.gradient_accumulation_steps=3"
    error = refused(recipe, 2, "no-6", named, "train.steps=0", "train.epochs=9", wider)
    assert "so epochs are other steps; change train.gradient_accumulation_steps, or set train.steps" in error


def test_other_data_of_as_many_rows_is_refused(recipe, tiny, tmp_path):
    chats = (tiny / "chats.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(reversed(chats)))
    words = (
        *SAVING,
        "data.packing=false",
        f"data.train={tmp_path}/other.jsonl",
        "data.eval_size=0",
        "train.eval_steps=0",
    )
    plain = (*words[:2], "data.packing=false", "data.eval_size=0", "train.eval_steps=0")
    run_train(2, recipe, "other-data", *plain, "train.steps=4")
    error = refused(recipe, 2, "other-data", *words)
    assert "the checkpoint was made with other data (" in error and "as many rows): keep [data], and the day" in error


@pytest.mark.slow
def test_a_run_directory_that_a_rank_does_not_see_is_refused(recipe):
    results = run_world(2, unshared, [str(recipe), "run.name=unshared"])
    assert results[1][0] == 2 and "not seen by every rank; set run.dir" in results[1][2]


def unshared(words):
    import shardbook.run.directory as rundir

    if os.environ["RANK"] == "1":
        rundir.RunDirectory.path = property(lambda self: rundir.Path("/nowhere"), lambda self, value: None)
    return train_rank(words)


def test_a_finished_run_says_so_and_does_nothing(recipe, straight):
    before = (straight / "metrics.jsonl").read_text()
    results = run_world(2, train_rank, [str(recipe), "run.name=straight", *SAVING])
    assert [code for code, _, _ in results] == [0, 0]
    assert "this run has finished its 6 steps; raise train.steps above 6, or choose another run.name" in results[0][1]
    assert (straight / "metrics.jsonl").read_text() == before
    # more steps: from its last checkpoint; without one, refused rather than started over
    run = run_train(2, recipe, "kept-none", "train.steps=2")
    error = refused(recipe, 2, "kept-none", "train.steps=3")
    assert "finished at step 2 without a checkpoint" in error and losses(run) == losses(run)[:2]
    results = run_world(2, train_rank, [str(recipe), "run.name=kept-none", "train.steps=2"])
    assert "finished its 2 steps; choose another run.name" in results[0][1]  # what would be refused is not advised


def test_a_finished_run_does_not_go_back_to_an_older_checkpoint(recipe, straight):
    run = straight.parent / "older"
    shutil.copytree(straight, run, ignore=shutil.ignore_patterns("step-000006"))
    before = (run / "metrics.jsonl").read_text()
    error = refused(recipe, 2, "older", *SAVING, "train.steps=8")
    named = run / "checkpoints" / "step-000004"
    assert f"choose another run.name, with train.resume_from_checkpoint={named} to go on from there" in error
    assert (run / "metrics.jsonl").read_text() == before
    # as advised
    again = run_train(2, recipe, "elsewhere", *SAVING, f"train.resume_from_checkpoint={named}")
    assert losses(again) == losses(straight)[4:]
