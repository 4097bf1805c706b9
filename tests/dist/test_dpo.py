"""Preferences under every stage: one plain process's numbers, packed or padded, in any split; resumed to the bit."""

import itertools
import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import reference
import torch
from cases import (
    DECAY,
    MAX_NORM,
    RATE,
    TOLERANCE,
    Case,
    assert_case,
    assert_events,
    layouts,
    outcomes_of,
    run_cases,
    same_bits,
)
from pairs import DIFFERENCE, all_but_speed, answers_of_first, go_on_from, pairs_of_steps
from pipeline_cases import deep
from tiny import write_pairs
from world import losses, metrics, run_train, run_world, train_rank

ROWS = 24


def slow(value):
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", ROWS)


def words_of(kind: str, pairs) -> tuple[str, ...]:
    method, _, loss_type = kind.partition(":")
    words = (f"method={method}", f"data.train={pairs}", "data.max_length=96")
    return (*words, f"preference.loss_type={loss_type}") if loss_type else words


@pytest.fixture(scope="module")
def wanted_of(recipe, tiny, pairs):
    @cache
    def train(kind: str, rows: int, clips: bool, folder: str, more: tuple[str, ...], steps: int) -> reference.Result:
        load = reference.AutoModelForCausalLM.from_pretrained
        model = load(tiny / folder, dtype=torch.float64, attn_implementation="eager")
        method, _, loss_type = kind.partition(":")
        words = (*words_of(kind, pairs), *more)
        steps = pairs_of_steps(recipe, tiny, words, rows, steps)
        result = reference.train_pairs(model, steps, method, loss_type, RATE, DECAY, MAX_NORM if clips else 0.0)
        result.rows = answers_of_first(recipe, tiny, words, rows)
        return result

    def of(kind: str, case: Case) -> reference.Result:
        more = tuple(word for word in case.extra if word.startswith("data.") and word not in words_of(kind, pairs))
        return train(kind, case.rows, case.clips, case.folder, more, case.steps)

    return of


KINDS = ["dpo:sigmoid", "dpo:ipo", "dpo:apo_zero", "orpo", "simpo"]


def cases_of(kind: str, pairs) -> list[Case]:
    options = itertools.cycle([(1, False, True, "none"), (3, True, True, "full"), (2, False, False, "selective")])
    words = words_of(kind, pairs)
    every = [layout for world in ((1, 2) if kind == "dpo:ipo" else (2,)) for layout in layouts(world)]
    return [Case(*layout, *next(options), extra=words) for layout in every]


@pytest.mark.parametrize("kind", [KINDS[0], *map(slow, KINDS[1:])])
def test_every_stage_is_the_plain_process_to_a_millionth(kind, recipe, tiny, pairs, wanted_of, tmp_path):
    chosen = cases_of(kind, pairs)
    if kind == KINDS[0]:  # the others in the slow run
        chosen = [case for case in chosen if case.world == 2 and case.stage == "zero3"]
    for world in {case.world for case in chosen}:
        those = [case for case in chosen if case.world == world]
        assert run_world(world, run_cases, recipe, tiny, those, tmp_path) == [[]] * world
    for case in chosen:
        assert_case(case, outcomes_of(case, tmp_path), wanted_of(kind, case), DIFFERENCE)


ROOM = ("data.max_length=252",)  # rows of several pairs, which slices cut, and of which three ranks have thirds
PADDED = ("data.packing=false",)
# kinds and layouts; those of one world run in it together
BESIDE = [
    ("dpo:sigmoid", Case("zero2", 1, 1, 3, True, checkpointing="full", pp=2, steps=5)),
    ("orpo", Case("zero1", 1, 1, 2, tied=False, pp=2, schedule="gpipe")),
    ("dpo:sigmoid", Case("zero3", 1, 1, 3, True, checkpointing="full", extra=ROOM, cp=2, steps=5)),
    ("orpo", Case("ddp", 1, 1, 2, tied=False, extra=ROOM, cp=2)),
]
BESIDE_TOO = [
    ("dpo:ipo", Case("zero3", 1, 2, 2, True, pp=2)),
    ("dpo:apo_zero", Case("ddp", 2, 1, 2, tied=False, pp=2, schedule="gpipe", extra=PADDED)),
    ("simpo", Case("hsdp", 2, 1, 3, True, pp=2, schedule="gpipe", steps=5)),
    ("orpo", Case("zero1", 1, 2, 3, True, checkpointing="selective", pp=2)),
    ("dpo:sigmoid", Case("zero3", 1, 1, 3, True, pp=3)),
    ("simpo", deep("zero2", 1, 1, 4, clips=True, checkpointing="full", pp=2, chunks=2, schedule="interleaved")),
    ("dpo:ipo", Case("zero3", 1, 2, 2, True, extra=ROOM, cp=2)),
    ("dpo:apo_zero", Case("ddp", 2, 1, 2, tied=False, extra=PADDED, cp=2)),
    ("simpo", Case("hsdp", 2, 1, 3, True, checkpointing="selective", extra=ROOM, cp=2, steps=5)),
    ("orpo", Case("zero2", 1, 1, 2, True, extra=ROOM, cp=3)),
    ("dpo:sigmoid", Case("zero1", 1, 1, 2, extra=ROOM, cp=4)),
    ("dpo:sigmoid", Case("zero3", 1, 1, 2, True, extra=ROOM, cp=2, pp=2)),
    ("orpo", Case("zero3", 1, 1, 2, True, checkpointing="full", extra=ROOM, cp=2, tp=2)),
    ("simpo", Case("zero2", 1, 1, 2, True, pp=2, tp=2)),
    ("dpo:ipo", Case("ddp", 1, 1, 3, tied=False, extra=ROOM, cp=2, tp=2, steps=5)),
    ("dpo:apo_zero", Case("zero1", 1, 1, 3, True, extra=ROOM, cp=2, pp=2, steps=5)),
]


@pytest.mark.parametrize(
    "beside", [BESIDE, pytest.param(BESIDE_TOO, marks=pytest.mark.slow)], ids=["two ranks", "others"]
)
def test_beside_pipeline_and_context_parallel(beside, recipe, models, pairs, wanted_of, tmp_path):
    """Along cp a pair lies on several ranks, which add up what each has of it."""
    chosen = [(kind, replace(case, extra=(*words_of(kind, pairs), *case.extra))) for kind, case in beside]
    for world in {case.world for _, case in chosen}:
        those = [case for _, case in chosen if case.world == world]
        assert run_world(world, run_cases, recipe, models, those, tmp_path) == [[]] * world
    for kind, case in chosen:
        worst = assert_case(case, outcomes_of(case, tmp_path), wanted_of(kind, case), DIFFERENCE)
        assert_events(outcomes_of(case, tmp_path))
        print(f"\nworst {worst:.1e}  {kind} {case.layout}")


def pairs_are_not_summed():
    """A rank has a pair's loss of its own slice's tokens."""
    from shardbook.parallel.sharding import ShardedModel

    ShardedModel.sum_slices = lambda sharded, part: part


def sums_have_sums_of_gradients():
    """As torch's own all-reduce, which takes each rank's loss for another. Loss exact, the gradient twice."""
    import torch.distributed as dist

    from shardbook.comm.collectives import SumOverRanks

    def backward(ctx, grad_output):
        grad_output = grad_output.clone()
        dist.all_reduce(grad_output)  # cp is the world
        return grad_output, None

    SumOverRanks.backward = staticmethod(backward)


def terms_are_counted_on_each_slice():
    from shardbook.parallel.layout import Layout

    Layout.term_copies = lambda layout, of_sequences: layout.tp_size


def pairs_are_counted_on_each_slice():
    from shardbook.run import prefetch

    real = prefetch.count_totals
    prefetch.count_totals = lambda micros, sequences, cp_rank: real(micros, sequences)


def averages_are_of_a_slice():
    """The odds of an answer for each token of a slice. (Where a slice has none it is no number.)"""
    from shardbook.data import loader

    real = loader.slice_rows

    def slice_rows(micro, batching):
        made = real(micro, batching)
        return replace(made, counts=torch.tensor(made.trained, dtype=torch.float32).clamp(min=1))

    loader.slice_rows = slice_rows


def reference_of_another_stage():
    """The last stage is asked without what the one before it has computed."""
    from shardbook.run.eval import reference

    real = reference.run_forward

    def run_forward(sharded, micro, loss_function, device):
        def alone(model, micro):
            hidden = torch.zeros_like(model.keywords["hidden"])
            return loss_function(lambda *given: model.func(*given, hidden=hidden), micro)

        return real(sharded, micro, alone, device)

    reference.run_forward = run_forward


CP, PP = (Case("zero3", 1, 1, 2, extra=ROOM, cp=2), Case("zero2", 1, 1, 2, pp=2))
BUGS = [
    (pairs_are_not_summed, "dpo:sigmoid", CP),
    (sums_have_sums_of_gradients, "simpo", CP),
    (terms_are_counted_on_each_slice, "orpo", CP),
    (pairs_are_counted_on_each_slice, "dpo:sigmoid", CP),
    (averages_are_of_a_slice, "orpo", CP),
    (reference_of_another_stage, "dpo:sigmoid", PP),
]


@pytest.mark.parametrize(("bug", "kind", "case"), [BUGS[0], *map(slow, BUGS[1:])])
def test_a_bug_beside_an_axis_is_seen(bug, kind, case, recipe, models, pairs, wanted_of, tmp_path):
    case = replace(case, extra=(*words_of(kind, pairs), *case.extra))
    assert run_world(case.world, run_planted, bug, recipe, models, [case], tmp_path) == [[]] * case.world
    with pytest.raises(AssertionError) as red:
        assert_case(case, outcomes_of(case, tmp_path), wanted_of(kind, case), DIFFERENCE)
    print(f"{bug.__name__}: {str(red.value).strip().splitlines()[0]}")


def run_planted(bug, *given):
    bug()
    return run_cases(*given)


@pytest.mark.slow
def test_two_ranks_bitwise(recipe, tiny, pairs, tmp_path):
    words = words_of("dpo:sigmoid", pairs)
    for micros, classes in ((1, [["ddp", "zero1", "zero2", "zero3"]]), (3, [["ddp", "zero1"], ["zero2", "zero3"]])):
        cases = {
            s: Case(s, *((2, 1) if s == "ddp" else (1, 2)), micros, extra=words) for s in itertools.chain(*classes)
        }
        assert run_world(2, run_cases, recipe, tiny, list(cases.values()), tmp_path) == [[], []]
        for group in classes:
            first, *others = [outcomes_of(cases[stage], tmp_path)[0].result for stage in group]
            assert all(same_bits(first, other) for other in others)


SAVING = ("train.steps=6", "train.save_steps=2")


@pytest.fixture(scope="module")
def straight(recipe, pairs):
    return run_train(2, recipe, "straight", *SAVING, *words_of("dpo:sigmoid", pairs))


def test_the_first_loss_is_ln_2_and_metrics_are_trls(straight):
    rows = metrics(straight)
    assert rows[0]["eval/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert rows[1]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    names = {f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")}
    names |= {"logps/chosen", "logps/rejected"}
    for what, row in (("eval", rows[0]), ("train", rows[1]), ("eval", rows[-1]), ("train", rows[-1])):
        assert {f"{what}/{name}" for name in names} <= row.keys()
        margin = row[f"{what}/rewards/chosen"] - row[f"{what}/rewards/rejected"]
        assert margin == pytest.approx(row[f"{what}/rewards/margins"], abs=1e-7)
    assert rows[1]["train/rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["eval/rewards/margins"] and rows[-1]["train/rewards/margins"]  # it moves


@pytest.mark.parametrize(("step", "keep"), [(0, False), slow((0, True)), slow((4, False)), (4, True)])
def test_a_kill_during_and_after_the_reference_goes_on_bitwise(step, keep, recipe, pairs, straight):
    """And where the file is gone: the weights that the run began with are asked again."""
    name = f"again-{step}-{keep}"
    run = go_on_from(straight, name, step, keep)
    before = (run / "reference.npz").stat().st_mtime_ns if keep else 0
    run_train(2, recipe, name, *SAVING, *words_of("dpo:sigmoid", pairs))
    assert all_but_speed(run) == all_but_speed(straight)
    assert not keep or (run / "reference.npz").stat().st_mtime_ns == before  # read, not asked again


AXES = {"cp": ("parallel.cp_size=2",), "pp": ("parallel.pp_size=2", "parallel.stage=zero1")}


@pytest.mark.parametrize("axis", ["cp", slow("pp")])
def test_metrics_are_those_without_an_axis_and_a_kill_goes_on_bitwise(axis, recipe, pairs, straight):
    """Rows of two ranks, one after another. The run that is killed once goes on with its reference, once without."""
    words = (*SAVING, *words_of("dpo:sigmoid", pairs), "train.gradient_accumulation_steps=2", *AXES[axis])
    run = run_train(2, recipe, f"{axis}-straight", *words)
    for one, two in zip(all_but_speed(straight), all_but_speed(run), strict=True):
        for named in (one, two):
            named.pop("train/rewards/accuracies", 0), named.pop("eval/rewards/accuracies", 0)  # of rounding at first
        assert two == pytest.approx(one, rel=DIFFERENCE, abs=DIFFERENCE)
    known, other = (np.load(each / "reference.npz") for each in (straight, run))
    np.testing.assert_allclose(other["train"], known["train"], rtol=TOLERANCE)
    np.testing.assert_allclose(other["eval"], known["eval"], rtol=TOLERANCE)
    again = go_on_from(run, f"{axis}-again", 4, keep=False)
    run_train(2, recipe, again.name, *words)
    assert all_but_speed(again) == all_but_speed(run)


def stop_in_the_reference(rank_that_is_told, words):
    """SIGTERM to one rank in its second micro-batch."""
    import os
    import signal

    from shardbook.run.eval import reference

    before, calls = reference.log_probabilities, []

    def ask(*given):
        calls.append(1)
        if len(calls) == 2 and int(os.environ["RANK"]) == rank_that_is_told:
            os.kill(os.getpid(), signal.SIGTERM)
        return before(*given)

    reference.log_probabilities = ask
    return *train_rank(words), len(calls)


@pytest.mark.parametrize("step", [0, slow(4)])
def test_a_stop_during_the_reference_is_after_its_micro_batch(step, recipe, pairs, straight):
    name, words = f"stopped-{step}", [*SAVING, *words_of("dpo:sigmoid", pairs)]
    run = go_on_from(straight, name, 4, keep=False) if step else recipe.parent / name
    before = (run / "metrics.jsonl").read_text() if step else ""
    for code, out, _, calls in run_world(2, stop_in_the_reference, 1, [str(recipe), f"run.name={name}", *words]):
        assert (code, calls) == (75, 2), out
    assert not (run / "reference.npz").exists()
    # no step, no evaluation: as if the run had only begun
    assert before == ((run / "metrics.jsonl").read_text() if step else "") and (
        step or not (run / "metrics.jsonl").exists()
    )
    run_train(2, recipe, name, *words)
    assert all_but_speed(run) == all_but_speed(straight)


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], slow(lambda data: b"garbage"), slow(lambda data: b"")]
)
def test_a_damaged_reference_is_named(damage, recipe, pairs, straight):
    content = (straight / "reference.npz").read_bytes()
    name = f"damaged-{len(damage(content))}"
    run = go_on_from(straight, name, 4)
    (run / "reference.npz").write_bytes(damage(content))
    said = refused(recipe, name, *SAVING, *words_of("dpo:sigmoid", pairs))
    assert said.startswith(f"shardbook: {run}/reference.npz: damaged (")
    assert said.endswith("); remove it, and the reference is computed again")


@pytest.mark.slow
def test_more_steps_ask_of_more_rows(recipe, pairs, straight):
    words = words_of("dpo:sigmoid", pairs)
    run = run_train(2, recipe, "longer", *words, "train.steps=4", "train.save_steps=4")
    few = np.isinf(np.load(run / "reference.npz")["train"]).all(1).sum()
    run_train(2, recipe, "longer", *words, "train.steps=6")
    assert np.isinf(np.load(run / "reference.npz")["train"]).all(1).sum() == few - 4
    assert losses(run) == losses(straight)


def test_a_reference_of_trained_weights_is_seen(recipe, pairs, straight):
    """Planted bug: a run that goes on asks the reference of the weights that it has by then."""
    run = go_on_from(straight, "of-trained", 4, keep=False)
    words = [str(recipe), *SAVING, *words_of("dpo:sigmoid", pairs), "run.name=of-trained"]
    assert run_world(2, ask_what_is_trained, words) == [0, 0]
    with pytest.raises(AssertionError):
        assert all_but_speed(run) == all_but_speed(straight)


def ask_what_is_trained(words):
    from pathlib import Path

    from shardbook import train
    from shardbook.run import start

    real, checkpoint = start.load_base, Path(words[0]).parent / "of-trained" / "checkpoints" / "step-000004"

    def bug(recipe, sharded, folder):
        said = real(recipe, sharded, folder)
        start.load_checkpoint(checkpoint, sharded, torch.optim.AdamW(sharded.model.parameters()))
        return said

    start.load_base = bug
    return train.main(words)


def accepts_other_data(words):
    """A rank whose loader takes a checkpoint of other data: the reference must tell by itself."""
    from shardbook.data.loader import Loader

    real = Loader.load_state_dict
    Loader.load_state_dict = lambda self, state: real(self, state | {"data": self.documents.digest})
    return train_rank(words)


@pytest.mark.parametrize("what", ["data", slow("weights")])
def test_a_run_does_not_go_on_with_another_reference(what, recipe, pairs, straight, tmp_path):
    name = f"without-{what}"
    run = go_on_from(straight, name, 4)
    words = [*SAVING, *words_of("dpo:sigmoid", pairs)]
    if what == "data":
        rows = [json.loads(line) for line in pairs.read_text().splitlines()]
        rows[3]["chosen"][0]["content"] += "!"
        (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words.append(f"data.train={tmp_path}/other.jsonl")
    if what == "weights":
        words.append("model.init=random")
    for code, _, said in run_world(2, accepts_other_data, [str(recipe), f"run.name={name}", *words]):
        assert code == 2 and "reference.npz: is of other data or other weights" in said, said
    assert losses(run) == losses(straight)


def refused(recipe, name, *words):
    results = run_world(2, train_rank, [str(recipe), f"run.name={name}", *words])
    assert [code for code, _, _ in results] == [2, 2], results
    assert "reference " not in results[0][1]  # nothing was asked
    return results[0][2].splitlines()[-1]


@pytest.mark.slow
def test_a_checkpoint_of_a_run_with_another_reference_is_refused(recipe, pairs, straight):
    """Its weights are not the reference's: the first loss would not be ln 2."""
    words = (*SAVING, *words_of("dpo:sigmoid", pairs))
    other = run_train(2, recipe, "simpo", *SAVING, *words_of("simpo", pairs), "train.steps=2")
    named = f"train.resume_from_checkpoint={other}/checkpoints/step-000002"
    said = refused(recipe, "from-another", named, *words)
    assert (
        f"{other}/reference.npz is not there; to begin with what that run learned set model.path={other}/export" in said
    )
    begun = run_train(2, recipe, "from-export", *words, f"model.path={other}/export")
    assert metrics(begun)[1]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    named = f"train.resume_from_checkpoint={begun}/checkpoints/step-000002"
    assert "reference.npz is of another one, or of other data; to" in refused(recipe, "from-another", named, *words)
    source = straight / "checkpoints" / "step-000004"
    branch = run_train(2, recipe, "branch", *words, f"train.resume_from_checkpoint={source}")
    assert losses(branch) == losses(straight)[4:]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("method=simpo", "method was 'dpo' there, is 'simpo' here"),
        slow(("preference.loss_type=ipo", "preference.loss_type was 'sigmoid' there, is 'ipo' here")),
        ("preference.beta=0.5", "preference.beta was 0.1 there, is 0.5 here"),
    ],
)
def test_a_run_keeps_what_it_minimises(word, said, recipe, pairs, straight):
    name = "other-" + word.rpartition("=")[2]
    run = go_on_from(straight, name, 4)
    words = (*SAVING, *words_of("dpo", pairs), word)  # sigmoid is the default
    assert f"run {run}: {said}; a run keeps what it minimises: choose another run.name" in refused(recipe, name, *words)
    text = (run / "resolved.toml").read_text()
    (run / "resolved.toml").write_text(text.replace('method = "dpo"\n', "").replace("[preference]", "[other]"))
    if "beta" in word:  # an older run, which did not say; and what is not minimised may change
        run_train(2, recipe, name, *words, "optim.learning_rate=1e-3")
        assert losses(run)[:4] == losses(straight)[:4] and losses(run)[4:] != losses(straight)[4:]


@pytest.mark.slow
def test_a_checkpoint_that_is_refused_is_refused_before_the_reference_is_asked(recipe, tiny, pairs, straight):
    named = f"train.resume_from_checkpoint={straight}/checkpoints/step-000004"
    words = (*SAVING, *words_of("dpo:sigmoid", pairs), named)
    assert "is of another model" in refused(recipe, "unfit", *words, f"model.path={tiny}/untied")
    assert "seed 42, this recipe has" in refused(recipe, "unfit", *words, "train.seed=1")
    assert "is at step 4, the recipe ends at step 3" in refused(recipe, "unfit", *words, "train.steps=3")


@pytest.mark.slow
def test_adapters_of_another_run_are_named_as_an_adapter(recipe, pairs):
    words = (*SAVING, *words_of("dpo:sigmoid", pairs), "lora.r=4")
    other = run_train(2, recipe, "adapted", *words, "method=simpo", "preference.loss_type=sigmoid")
    named = f"train.resume_from_checkpoint={other}/checkpoints/step-000002"
    assert f"set lora.adapter={other}/export in its place" in refused(recipe, "from-adapted", named, *words)


def packed_pairs(recipe, tiny, pairs):
    from transformers import AutoTokenizer

    from shardbook.data.tokenized import build_documents
    from shardbook.recipe import load_recipe

    settings = load_recipe(recipe, [*words_of("dpo:sigmoid", pairs), *LONG])
    documents, _ = build_documents(settings.data, AutoTokenizer.from_pretrained(tiny / "model"), tiny / "model", 2)
    return settings, documents


LONG = ("data.max_length=256", "data.eval_size=0")  # rows of several pairs


def test_packed_is_padded_and_any_split_is_the_same(recipe, tiny, pairs):
    """The same pairs in every step: all of them."""
    words = (*words_of("dpo:sigmoid", pairs), *LONG, "train.steps=3", "train.export=false")
    packed = len(packed_pairs(recipe, tiny, pairs)[1].rows)
    assert packed < ROWS
    shapes = [(1, 1, packed, True), (1, packed, 1, True), (2, 3, 4, False), (1, 1, ROWS, False)]
    found = []
    for number, (world, micros, rows, packs) in enumerate(shapes):
        batch = f"train.per_device_train_batch_size={rows}", f"train.gradient_accumulation_steps={micros}"
        run = run_train(world, recipe, f"split-{number}", *words, f"data.packing={str(packs).lower()}", *batch)
        found.append([{k: v for k, v in row.items() if k.startswith("train/")} for row in metrics(run)])
        assert found[-1][0].pop("train/rewards/accuracies") <= 1  # of rewards that are rounding yet
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one == pytest.approx(two, rel=DIFFERENCE, abs=DIFFERENCE)
    assert found[0][0]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)


def test_a_pair_is_never_split_over_rows(recipe, tiny, pairs):
    from shardbook.data.loader import build_micro_batch, choose_batching
    from shardbook.parallel.mesh import DataRank

    settings, documents = packed_pairs(recipe, tiny, pairs)
    batching = choose_batching(settings.data, settings.train, DataRank(), "cpu", documents, sequences=2)
    assert any(len(row) > 1 for row in documents.rows)
    for row in documents.rows:
        micro = build_micro_batch(documents.encoded, [row], batching)
        assert len(micro.trained) == 2 * len(row) and micro.input_ids.shape[1] == 512
        starts = micro.cu_seqlens[: 2 * len(row)].tolist()
        assert micro.position_ids[0, starts].tolist() == [0] * 2 * len(row)


def test_a_pair_that_is_split_is_seen(recipe, tiny, pairs, monkeypatch):
    """Planted bug: a row takes the first answer of each pair, the next row the second."""
    from shardbook.data import loader

    real, turn = loader.sequences_of, itertools.count()
    monkeypatch.setattr(loader, "sequences_of", lambda document: [list(real(document))[next(turn) % 2]])
    with pytest.raises(AssertionError):
        test_a_pair_is_never_split_over_rows(recipe, tiny, pairs)


@pytest.mark.parametrize(
    ("stage", "beside"),
    [("zero3", ()), slow(("zero2", ())), slow(("ddp", ())), slow(("zero3", AXES["cp"])), slow(("ddp", AXES["cp"]))],
)
def test_adapters_off_is_the_precomputed_reference(stage, beside, recipe, tiny, pairs):
    """B = 0 at first, so the base is the policy of the first step; as many gathers as are predicted."""
    words = (*words_of("dpo:sigmoid", pairs), "lora.r=4", f"parallel.stage={stage}", "train.steps=3", *beside)
    words += ("train.gradient_accumulation_steps=2", "train.export=false")
    asked = run_train(2, recipe, f"asked-{stage}-{len(beside)}", *words)
    off = run_train(2, recipe, f"off-{stage}-{len(beside)}", *words, "preference.precompute_ref_log_probs=false")
    assert not (off / "reference.npz").exists() and np.load(asked / "reference.npz")
    assert losses(asked) == losses(off)
    for run in (asked, off):
        row = metrics(run)[1]
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            for unit in ("bytes", "calls"):
                key = f"comm/{name}_{unit}"
                assert row.get(key) == row.get(f"predicted/{key}"), key
