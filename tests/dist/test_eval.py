"""An evaluation gives the numbers that the run itself logged, under another stage and from whatever the run left."""

import contextlib
import io
import json
import os
import shutil

import pytest
from tiny import write_pairs
from world import metrics, run_train, run_world

from shardbook.recipe import RecipeError
from shardbook.run.eval.model import describe_rows, evaluation_recipe


def evaluate_rank(words):
    from shardbook.evaluate import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def evaluated(size, *words):
    (code, out, err), *others = run_world(size, evaluate_rank, [str(word) for word in words] + ["--json"])
    assert code == 0, err
    assert all(other[:2] == (0, "") for other in others)
    return json.loads(out)


def last(run):
    """The run's own numbers after its last step."""
    row = metrics(run)[-1]
    return {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}


def test_a_run_s_export_has_the_loss_that_its_run_logged(recipe, tiny):
    """Alone and unsharded, from the export; and rows of one's own, of the export as any other model."""
    run = run_train(2, recipe, "whole", "train.steps=3", "optim.learning_rate=1e-2", "data.eval_size=6")
    found = evaluated(1, run, "parallel.stage=ddp")
    assert found["loss"] == pytest.approx(last(run)["loss"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(2.718281828459045 ** found["loss"], rel=1e-9)
    assert (found["weights"], found["stage"], found["examples"]) == (str(run / "export"), "ddp", 6)
    rows = f"data={tiny}/chats.jsonl"
    own, plain = evaluated(1, run, rows), evaluated(1, run / "export", rows, "data.max_length=128")
    assert own["loss"] == pytest.approx(plain["loss"], rel=1e-6) and own["examples"] == plain["examples"] > 6
    ((code, out, err),) = run_world(1, evaluate_rank, [str(run), f"data.eval={tiny}/chats.jsonl"])
    assert code == 0, err
    assert f"rows     data.eval={tiny}/chats.jsonl, in place of data.eval_size=6 of the run\n" in out
    assert f"loss {own['loss']:.4f}" in out and " rows     " not in out


def test_a_result_that_is_in_no_checkpoint_is_read_from_the_export(recipe):
    words = ["optim.learning_rate=1e-2", "data.eval_size=6", "train.steps=3", "train.save_steps=2"]
    run = run_train(2, recipe, "beyond", *words)
    shutil.rmtree(run / "checkpoints" / "step-000003", ignore_errors=True)  # as save_steps=2 of a longer run leaves it
    found = evaluated(1, run)
    assert found["weights"] == str(run / "export") and found["loss"] == pytest.approx(last(run)["loss"], rel=1e-6)


def evaluate_late(words):
    """Rank 1 looks while the newest checkpoint is not published yet, and a library of rank 0's prints a line."""
    from shardbook import evaluate

    real, prepare = evaluate.newest_checkpoint, evaluate.prepare_job
    if os.environ["RANK"] == "1":
        evaluate.newest_checkpoint = lambda folder: real(folder).with_name("step-000002")
    evaluate.prepare_job = lambda *given: (print("a line of a library"), prepare(*given))[1]
    return evaluate_rank(words)


def test_ranks_evaluate_the_checkpoint_that_rank_0_finds(recipe):
    words = ["optim.learning_rate=1e-2", "data.eval_size=6", "train.steps=4", "train.save_steps=2"]
    run = run_train(2, recipe, "live", *words)
    results = run_world(2, evaluate_late, [str(run), "--json"])
    assert [code for code, _, _ in results] == [0, 0], results
    found = json.loads(results[0][1])
    assert found["weights"] == str(run / "checkpoints" / "step-000004") and "a line of a library" in results[0][2]
    assert found["loss"] == pytest.approx(last(run)["loss"], rel=1e-6)


def evaluate_stopped(words):
    """A request to stop came to rank 1 while its process was being started."""
    from shardbook.ranks import signals

    signals.EARLY.append(signals.StopFlag(asked=os.environ["RANK"] == "1"))
    return evaluate_rank(words)


def test_a_program_reads_no_line_for_people(recipe, tiny):
    """Where the evaluation was stopped before it began."""
    line = "stopped  before anything was built; run the same command again\n"
    words = [str(tiny / "model"), f"data={tiny}/chats.jsonl"]
    for is_json, first in (([], (75, line, "")), (["--json"], (75, "", line))):
        assert run_world(2, evaluate_stopped, [*words, *is_json]) == [first, (75, "", "")]


def test_a_preference_has_accuracy_and_margin_against_its_reference(recipe, tmp_path):
    """From a checkpoint, whose run's reference is the model that it began with."""
    rows = write_pairs(tmp_path / "pairs.jsonl", 24)
    words = ["method=dpo", f"data.train={rows}", "data.eval_size=6", "optim.learning_rate=1e-2", "train.save_steps=3"]
    run = run_train(2, recipe, "pairs", *words, "train.steps=3", "train.export=false")
    found = evaluated(1, run)
    wanted = last(run)
    assert wanted["rewards/margins"] != 0 and "perplexity" not in found
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert found["weights"].endswith("checkpoints/step-000003")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_preferences_are_evaluated_beside_axes(method, recipe, tmp_path):
    rows = write_pairs(tmp_path / "pairs.jsonl", 24)
    words = [f"method={method}", f"data.train={rows}", "data.eval_size=6", "optim.learning_rate=1e-2"]
    run = run_train(2, recipe, f"axes-{method}", *words, "train.steps=3")
    for axis in ("cp", "pp", "tp"):
        found = evaluated(2, run, f"parallel.{axis}_size=2")
        assert {name: found[name] for name in last(run)} == pytest.approx(last(run), rel=1e-4, abs=1e-6), axis


def test_adapters_are_evaluated_with_their_base(recipe):
    words = ["lora.r=4", "data.eval_size=6", "optim.learning_rate=1e-1", "train.steps=3"]
    run = run_train(2, recipe, "adapters", *words)
    assert evaluated(2, run)["loss"] == pytest.approx(last(run)["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("held", "words", "rows", "line"),
    [
        ("eval_size = 6", [], ("", 6), ""),
        ("eval_size = 6", ["data.eval=b.jsonl"], ("b.jsonl", 0), "data.eval=b.jsonl, in place of data.eval_size=6"),
        ("eval = 'a.jsonl'", ["data.eval_size=0.5"], ("", 0.5), "data.eval_size=0.5, in place of data.eval=a.jsonl"),
        ("eval = 'a.jsonl'", ["data.eval=b.jsonl"], ("b.jsonl", 0), "data.eval=b.jsonl, in place of data.eval=a.jsonl"),
        ("eval_size = 6", ["data=b.jsonl"], ("b.jsonl", 0), "data.eval=b.jsonl, in place of data.eval_size=6"),
        ("eval_size = 0", ["data.eval=b.jsonl"], ("b.jsonl", 0), "data.eval=b.jsonl, in place of none"),
        ("eval_size = 6", ["data.eval="], ("", 6), ""),
    ],
)
def test_rows_that_are_named_take_the_place_of_those_that_the_run_held_out(tmp_path, held, words, rows, line):
    (tmp_path / "resolved.toml").write_text(f"[data]\ntrain = 'a.jsonl'\n{held}\n[train]\nsteps = 5\n")
    recipe, run = evaluation_recipe(str(tmp_path), words)
    assert (recipe.data.eval, recipe.data.eval_size) == rows
    assert describe_rows(recipe, run) == line + " of the run" * bool(line)
    with pytest.raises(RecipeError, match="eval_size = 3: set one of the two"):
        evaluation_recipe(str(tmp_path), ["data.eval=b.jsonl", "data.eval_size=3"])


def test_what_cannot_be_evaluated_is_refused(recipe, tiny, tmp_path):
    with pytest.raises(RecipeError, match=r"eval .*: name rows with data=FILE"):
        evaluation_recipe(str(tmp_path), [])
    (tmp_path / "resolved.toml").write_text("[train]\nsteps = 5\n")
    with pytest.raises(RecipeError, match=r"its run held no rows out; name rows with data=FILE"):
        evaluation_recipe(str(tmp_path), [])
    for model, rows, said in (
        ("./nowhere", tiny / "chats.jsonl", "model.path = './nowhere': no such directory"),
        (tmp_path, "absent.jsonl", "data.train = 'absent.jsonl': no such file"),
    ):
        for code, out, err in run_world(2, evaluate_rank, [str(model), f"data={rows}"]):
            assert code == 2 and not out and err.startswith(f"shardbook: {said}"), err
