"""Biases of routers that move towards balance, through whole runs: against one plain transformers process that counts
choices by hooks of its own and moves the biases by hand, to the bit; as state of checkpoints; and in exports."""

import dataclasses
import itertools
import os
import shutil
from fractions import Fraction
from functools import cache

import pytest
import reference
import torch
from cases import (
    DECAY,
    MAX_NORM,
    RATE,
    Case,
    assert_events,
    assert_exact_bytes,
    assert_parity,
    assert_replicas_agree,
    documents_of_steps,
    outcomes_of,
    run_cases,
)
from families import write_family
from planted import replace
from safetensors.torch import load_file
from test_balance import place
from test_damage import flip
from test_expert_load import EP, UNPACKED, Choices
from tiny import said_by
from traced import traced
from world import losses, metrics, run_train, run_world, train_rank

from shardbook.cli import main
from shardbook.run.checkpoint.format import read_stored, verify
from shardbook.run.checkpoint.load import read_parameters
from shardbook.run.checkpoint.save import predict_bytes

STEP = 0.02  # twenty times the usual rate: choices change with each step, as they would after many
MOVES = f"train.router_bias_update_rate={STEP}"
CASES = [
    Case("zero3", 1, 2, 3, True, checkpointing="selective", extra=(MOVES,)),
    Case("ddp", 2, 1, 2, checkpointing="full", extra=(MOVES, EP, "train.logging_steps=2")),
    Case("zero2", 1, 2, 2, extra=(MOVES, UNPACKED, "train.per_device_train_batch_size=2")),
    Case("zero1", 1, 2, 2, True, extra=(MOVES, EP, UNPACKED, "offload.optimizer=cpu")),
    Case("zero1", 1, 1, 3, pp=2, extra=(MOVES,)),
]
WIDE = [
    Case("hsdp", 2, 2, 2, True, extra=(MOVES, EP)),
    Case("zero3", 1, 2, 2, True, cp=2, checkpointing="full", extra=(MOVES, EP)),
    Case("zero2", 1, 2, 4, True, pp=2, checkpointing="full", extra=(MOVES, EP)),
    Case("ddp", 4, 1, 1, extra=(MOVES, UNPACKED, "train.check_steps=1", "train.deterministic=true")),
]
COMPILED = [
    Case("zero3", 1, 2, 2, extra=(MOVES, "train.compile=true")),
    Case("zero2", 1, 2, 2, checkpointing="full", extra=(MOVES, "train.compile=true", UNPACKED)),
]


def is_bias(name):
    return name.endswith(("e_score_correction_bias", "expert_bias"))


def write_biased(folder, family, documents):
    """A tiny model of a family whose routers are near balance on these documents: there a few tokens more or less, or a
    step more, turn the sign of a bias."""
    write_family(folder / "model", family)
    choices = Choices(folder / "model")
    biases = {name: bias for name, bias in choices.model.named_buffers() if is_bias(name)}
    for size in (0.1 * 0.9**number for number in range(40)):
        with torch.no_grad():
            choices.run(documents)
        counts = torch.tensor(choices.take()).view(len(biases), -1).double()
        for bias, direction in zip(biases.values(), (counts.mean(1, keepdim=True) - counts).sign(), strict=True):
            bias += size * direction
    choices.model.save_pretrained(folder / "model")
    return folder


def train_moved(folder, steps, max_norm, first=0):
    """Trains transformers' model in `folder` on the documents of each step, and moves its biases after each from the
    `first` on. Returns the result, and the biases after each step."""
    choices, after = Choices(folder), []
    biases = {name: bias for name, bias in choices.model.named_buffers() if is_bias(name)}
    assert biases and len(biases) == len(choices.modules)

    def move():
        counts, rate = choices.take(), STEP if len(after) >= first else 0.0
        for bias in biases.values():  # in the order of their blocks, as the counts are
            chosen, counts = counts[: len(bias)], counts[len(bias) :]
            mean = Fraction(sum(chosen), len(chosen))
            for expert, count in enumerate(chosen):
                if count != mean:
                    bias[expert] = bias[expert] + torch.tensor(rate if count < mean else -rate)
        assert not counts
        after.append({name: bias.clone() for name, bias in biases.items()})

    def loss_of(step):
        if step:
            move()
        parts = choices.run(steps[step])
        return sum(part for part, _ in parts) / sum(count for _, count in parts)

    result = reference.descend(choices.model, loss_of, len(steps), RATE, DECAY, max_norm)
    move()
    return result, after


def run_keeping(bug, recipe, folder, cases, results):
    """`run_cases` with what `bug` plants; the biases that each case ends with go to results/<case>.biases.<rank>."""
    from shardbook.run.build import build_sharded

    built = []

    def build(*given):
        built.append(real(*given))
        return built[-1]

    replace(real := build_sharded, build)
    if bug:
        bug()
    errors, rank = run_cases(recipe, folder, cases, results), os.environ["RANK"]
    for case, sharded in zip(cases, built, strict=not errors):
        biases = {name: bias.clone() for name, bias in sharded.model.named_buffers() if is_bias(name)}
        torch.save(biases, results / f"{case.name}.biases.{rank}")
    return errors


@pytest.fixture(scope="module")
def expected(recipe, tiny, tmp_path_factory):
    """By family and case what the plain process makes of it, and the folder of the family's model."""
    folder = tmp_path_factory.mktemp("biased")
    (some,) = documents_of_steps(recipe, tiny, 8, (UNPACKED,), steps=1)
    folder_of = cache(lambda family: write_biased(folder / family, family, some))

    @cache
    def of(family, rows, clips, words, count):
        steps = documents_of_steps(recipe, tiny, rows, words, count)
        return train_moved(folder_of(family) / "model", steps, MAX_NORM if clips else 0.0)

    def expect(family, case):
        words = tuple(word for word in case.extra if word.startswith("data."))
        return of(family, case.rows, case.clips, words, case.steps)

    return folder_of, expect


def assert_moved(family, cases, expected, results):
    for case in cases:
        outcomes, (want, biases) = outcomes_of(case, results), expected[1](family, case)
        seen = list[str]()
        for rank in range(case.world):
            ours = torch.load(results / f"{case.name}.biases.{rank}")
            seen += ours
            for name, bias in ours.items():
                wanted = biases[-1][name]
                assert torch.equal(bias, wanted), f"{case.name}: {name} on rank {rank}: {bias}, not {wanted}"
        copies = case.world // case.pp  # along pp each rank has those of its blocks
        assert sorted(seen) == sorted(copies * [*biases[-1]])
        assert_replicas_agree(outcomes)
        assert_exact_bytes(outcomes)
        if case.cp == 1:
            assert_events(outcomes)
        if case.said("train.logging_steps", "1") == "1":
            assert_parity(outcomes[0].result, want, case=case.name)


@pytest.mark.parametrize(
    "family", ["glm4_moe", *(pytest.param(f, marks=pytest.mark.slow) for f in ("deepseek_v3", "minimax_m2"))]
)
def test_biases_are_those_of_one_process(family, recipe, expected, tmp_path):
    """And so is what is learned beside them; biases have moved at each step, and not all the same way."""
    assert run_world(2, run_keeping, None, recipe, expected[0](family), CASES, tmp_path) == [[], []]
    assert_moved(family, CASES, expected, tmp_path)
    for case in CASES:
        moved = [torch.cat([*biases.values()]) for biases in expected[1](family, case)[1]]
        assert all({-1.0, 1.0} <= {*(b - a).sign().tolist()} for a, b in itertools.pairwise(moved))


@pytest.mark.slow
def test_ranks_along_every_axis_move_them_alike(recipe, expected, tmp_path):
    assert run_world(4, run_keeping, None, recipe, expected[0]("glm4_moe"), WIDE, tmp_path) == [[]] * 4
    assert_moved("glm4_moe", WIDE, expected, tmp_path)


@pytest.mark.slow
def test_compiled_blocks_see_them_move(recipe, expected, tmp_path):
    """Their values are in no graph, and make no other one."""
    folder = expected[0]("glm4_moe")
    assert run_world(2, traced, run_keeping, None, recipe, folder, COMPILED, tmp_path) == [[], []]
    assert_moved("glm4_moe", COMPILED, expected, tmp_path)


def count_graphs(*given):
    from torch._dynamo.utils import counters

    assert not traced(run_keeping, *given)
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.slow
def test_blocks_share_a_graph_as_where_they_stay(recipe, expected, tmp_path):
    case, graphs = dataclasses.replace(COMPILED[0], shards=1), []
    for rate in (STEP, 0.0):
        (results := tmp_path / f"{rate}").mkdir()
        words = (f"train.router_bias_update_rate={rate}", *case.extra[1:])
        still = dataclasses.replace(case, extra=words)
        graphs += run_world(1, count_graphs, None, recipe, expected[0]("glm4_moe"), [still], results)
    assert graphs[0] == graphs[1] and graphs[0][0] > 0


# -- planted bugs


def counts_of_own_tokens():
    from shardbook.parallel.expert_load import ExpertLoad

    ExpertLoad.sum = lambda load: load.counts


def the_other_way():
    from shardbook.parallel.router_bias import RouterBiases

    real = RouterBiases.move
    RouterBiases.move = lambda biases, counts: real(biases, {number: -each for number, each in counts.items()})


def moved_by_an_evaluation_too():
    from shardbook.parallel.router_bias import balance_routers
    from shardbook.run.eval.observer import evaluate

    def evaluate_and_move(sharded, *given):
        balance = evaluate(sharded, *given)
        balance_routers(sharded)
        return balance

    replace(evaluate, evaluate_and_move)


def padding_counts():
    from shardbook.parallel.expert_load import ExpertLoad

    real = ExpertLoad.open
    ExpertLoad.open = lambda load, micro: real(
        load, dataclasses.replace(micro, is_token=torch.ones_like(micro.is_token))
    )


def the_last_micro_batch_counts_alone():
    from shardbook.parallel.expert_load import ExpertLoad

    real = ExpertLoad.open
    ExpertLoad.open = lambda load, micro: (load.clear(), real(load, micro))


BUGS = {
    counts_of_own_tokens: CASES[2],
    the_other_way: CASES[2],
    moved_by_an_evaluation_too: CASES[0],
    padding_counts: CASES[2],
    the_last_micro_batch_counts_alone: CASES[2],
}
QUICK = (the_other_way,)


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.slow] * (bug not in QUICK)) for bug in BUGS])
def test_a_planted_bug_turns_it_red(bug, recipe, expected, tmp_path):
    """It runs to its end, and is wrong."""
    case = BUGS[bug]
    assert run_world(2, run_keeping, bug, recipe, expected[0]("glm4_moe"), [case], tmp_path) == [[], []]
    with pytest.raises(AssertionError, match="bias on rank"):  # whatever else is wrong
        assert_moved("glm4_moe", [case], expected, tmp_path)


# -- what goes beside it, and what does not


@pytest.mark.slow
def test_routers_that_are_frozen_stay_while_biases_move(recipe, expected):
    words = (f"model.path={expected[0]('glm4_moe')}/model", MOVES, "train.freeze_router=true", "train.steps=2")
    before = exported(expected[0]("glm4_moe") / "model")
    after = exported(run_train(2, recipe, "frozen", *words) / "export")
    routers, biases = ([name for name in before if name.endswith(end)] for end in ("gate.weight", "correction_bias"))
    assert len(routers) == len(biases) == 3 and all(torch.equal(before[name], after[name]) for name in routers)
    assert not any(torch.equal(before[name], after[name]) for name in before.keys() - routers)


def test_a_model_without_them_is_refused_before_it_is_built(recipe, tiny):
    message = "family 'llama' has no router whose choices are counted and that adds a bias to them"
    assert message in said_by(place, recipe, tiny / "model", [MOVES])


# -- state of checkpoints, and exports


SAVING = ("train.steps=4", "train.save_steps=2", "train.gradient_accumulation_steps=2", "parallel.ep_size=2")
STILL = "train.router_bias_update_rate=0"
# two pipeline stages, and as many rows in a step
STAGES = ("parallel.stage=zero1", "parallel.ep_size=1", "parallel.pp_size=2", "train.gradient_accumulation_steps=4")
FILE = "model.safetensors"


def words_of(expected, *words):
    return (f"model.path={expected[0]('glm4_moe')}/model", *SAVING, *words)


@pytest.fixture(scope="module")
def straight(recipe, expected):
    """Four steps without a stop; checkpoints at 2 and 4."""
    return run_train(2, recipe, "straight", *words_of(expected, MOVES))


@pytest.fixture(scope="module")
def after(recipe, tiny, expected):
    """The biases of the plain process after each step, moved from a `first` one on."""
    return cache(
        lambda first=0: train_moved(
            expected[0]("glm4_moe") / "model", documents_of_steps(recipe, tiny, 4, steps=4), 0.0, first
        )[1]
    )


def stopped(run, name, step=2):
    """A copy of `run` as it was after `step`."""
    into = run.parent / name
    shutil.copytree(run, into, ignore=shutil.ignore_patterns("export", "run.json", "step-000004"))
    return into


def exported(folder):
    return load_file(folder / FILE)


def biases_in(checkpoint):
    shapes = read_stored(checkpoint).state.get("router_biases", {})
    return dict(read_parameters(checkpoint, {name: torch.Size(shape) for name, shape in shapes.items()}))


def assert_same(ours, theirs, names=None):
    assert ours.keys() >= (names := set(names or theirs)) and names
    assert all(torch.equal(ours[name], theirs[name]) for name in names)


def test_a_checkpoint_and_an_export_hold_them(recipe, expected, straight, after, tmp_path):
    """Each those of its step, as the plain process has them; whatever writes the export, and in fp32 in one of bf16.
    What a checkpoint takes on the disk is predicted with them."""
    placed = place(recipe, expected[0]("glm4_moe") / "model", [MOVES, "train.save_steps=2"])
    for step in (2, 4):
        assert_same(biases_in(checkpoint := straight / "checkpoints" / f"step-00000{step}"), after()[step - 1])
        verify(checkpoint)
        items = [item for rows in read_stored(checkpoint).items.values() for item in rows]
        assert sum(item.length for item in items if not item.name.startswith("own.")) == predict_bytes(placed)
        out = tmp_path / f"{step}"
        words = ["export", str(straight), "--checkpoint", str(checkpoint), "--out", str(out), "--dtype", "bf16"]
        assert main(words) == 0
        assert_same(exported(out), after()[step - 1])
    assert_same(exported(straight / "export"), after()[-1])


def test_pipeline_stages_save_and_export_those_of_their_blocks(recipe, expected, straight, after):
    """Neither file lacks any; without pp a run goes on from such a checkpoint as the plain process does."""
    run = run_train(2, recipe, "staged", *words_of(expected, MOVES, *STAGES))
    verify(checkpoint := run / "checkpoints" / "step-000002")
    assert_same(biases_in(checkpoint), after()[1])
    ours, theirs = exported(run / "export"), exported(straight / "export")
    assert ours.keys() == theirs.keys() and all(ours[name].dtype == theirs[name].dtype for name in theirs)
    assert_same(ours, after()[-1])
    assert losses(run) == pytest.approx(losses(straight), rel=1e-6)
    again = stopped(run, "unstaged")
    run_train(2, recipe, "unstaged", *words_of(expected, MOVES))
    assert_same(exported(again / "export"), after()[-1])
    assert losses(again) == pytest.approx(losses(straight), rel=1e-6)


def test_a_run_goes_on_bitwise(recipe, expected, straight):
    run = stopped(straight, "again")
    run_train(2, recipe, "again", *words_of(expected, MOVES))
    assert losses(run) == losses(straight)
    assert_same(exported(run / "export"), exported(straight / "export"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "words"),
    [
        (2, ("parallel.stage=zero1", "parallel.ep_size=1", "offload.optimizer=cpu")),
        (2, STAGES),
        (1, ("parallel.ep_size=1", "train.gradient_accumulation_steps=4")),
        (4, ("parallel.stage=hsdp", "parallel.dp_shard_size=2", "train.gradient_accumulation_steps=1")),
    ],
    ids=["zero1", "pp", "one-rank", "hsdp"],
)
def test_another_layout_goes_on(world, words, recipe, expected, straight, request):
    run = stopped(straight, name := f"to-{request.node.callspec.id}")
    run_train(world, recipe, name, *words_of(expected, MOVES, *words))
    assert losses(run) == pytest.approx(losses(straight), rel=1e-6)
    ours, theirs = exported(run / "export"), exported(straight / "export")
    assert_same(ours, theirs, filter(is_bias, theirs))
    assert all(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() < 1e-6 for name in theirs)


@pytest.mark.slow
def test_what_a_checkpoint_holds_stays_where_none_is_moved_any_more(recipe, expected, straight, after):
    """And is in the checkpoints that follow, from which a run goes on."""
    run = stopped(straight, "stays")
    run_train(2, recipe, "stays", *words_of(expected, STILL))
    for biases in (exported(run / "export"), biases_in(run / "checkpoints" / "step-000004")):
        assert_same(biases, after()[1])
    assert losses(run)[:2] == losses(straight)[:2]


@pytest.mark.slow
def test_from_a_checkpoint_without_any_the_files_biases_move(recipe, expected, after):
    """A run that moves none writes none. It goes back to such a checkpoint from a damaged one as if it had read no
    more."""
    still = run_train(2, recipe, "still", *words_of(expected, STILL))
    assert not any(biases_in(path) for path in (still / "checkpoints").iterdir())
    assert_same(exported(still / "export"), exported(expected[0]("glm4_moe") / "model"), after(9)[-1])
    run = stopped(still, "begins")
    run_train(2, recipe, "begins", *words_of(expected, MOVES))
    assert_same(exported(run / "export"), after(2)[-1])
    for rank in range(2):
        flip(run / "checkpoints" / "step-000004" / f"rank-{rank}.bin", 0.99)
    shutil.rmtree(run / "export")
    (run / "run.json").unlink()
    results = run_world(2, train_rank, [str(recipe), "run.name=begins", *words_of(expected, MOVES)])
    assert [code for code, _, _ in results] == [0, 0] and "went back to step-000002" in results[0][1], results
    assert_same(exported(run / "export"), after(2)[-1])


@pytest.mark.slow
def test_an_evaluation_of_a_checkpoint_has_them(recipe, expected, straight):
    from test_eval import evaluated

    shutil.copytree(straight, run := straight.parent / "read", ignore=shutil.ignore_patterns("export"))
    assert evaluated(1, run, "parallel.ep_size=1")["loss"] == pytest.approx(metrics(run)[-1]["eval/loss"], rel=1e-6)


def spoilt(words):
    from test_nonfinite import plant

    plant("loss")
    return train_rank(words)


@pytest.mark.slow
def test_those_of_a_step_that_is_not_finite_are_not_saved(recipe, expected, after):
    words = words_of(expected, MOVES, "train.save_steps=1", "train.logging_steps=0")
    results = run_world(2, spoilt, [str(recipe), "run.name=spoilt", *words])
    assert all(code and "step 3: train/loss is nan" in error for code, _, error in results), results
    checkpoints = sorted((recipe.parent / "spoilt" / "checkpoints").glob("step-*"))
    assert [path.name for path in checkpoints] == ["step-000001", "step-000002"]
    for checkpoint, biases in zip(checkpoints, after(), strict=False):
        assert_same(biases_in(checkpoint), biases)


def not_saved(words):
    from shardbook.parallel.router_bias import saved_biases

    replace(saved_biases, lambda sharded: {})
    return train_rank(words)


@pytest.mark.slow
def test_planted_a_checkpoint_without_them_is_seen(recipe, expected, straight):
    results = run_world(2, not_saved, [str(recipe), "run.name=unsaved", *words_of(expected, MOVES)])
    assert [code for code, _, _ in results] == [0, 0] and losses(straight.parent / "unsaved") == losses(straight)
    run = stopped(straight.parent / "unsaved", "lost")
    run_train(2, recipe, "lost", *words_of(expected, MOVES))
    with pytest.raises(AssertionError):
        assert_same(exported(run / "export"), exported(straight / "export"))
    assert losses(run) != losses(straight)
