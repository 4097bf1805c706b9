"""Optimizers whose state is smaller, over ranks: the same bits on every replica and in every stage of the same shards,
exact bytes, a resume to the bit, and what a checkpoint of another optimizer does."""

import importlib.util
import shutil

import pytest
import torch
from cases import Case, assert_exact_bytes, assert_replicas_agree, outcomes_of, relative_error, run_cases, same_bits
from eight_bit import FOLDER, add_torchao
from planted import replace
from safetensors.torch import load_file
from tiny import write_model
from toys import Scenario, Toy, train_toy
from world import losses, metrics, run_world, train_rank

from shardbook.run.checkpoint.format import read_stored

OURS, EIGHT = ("optim.name=adamw_bf16",), ("optim.name=adamw_8bit",)
LOW = (*OURS, "precision.master=bf16")
STAGES = [("ddp", 2, 1), ("zero1", 1, 2), ("zero2", 1, 2), ("zero3", 1, 2)]
SAVING = ("train.steps=4", "train.save_steps=2", "optim.max_grad_norm=0.5")


@pytest.fixture
def torchao():
    if not (FOLDER.is_dir() or importlib.util.find_spec("torchao")):
        pytest.skip("the extra `8bit` is not installed")


@pytest.mark.parametrize("extra", [OURS, LOW], ids=["moments", "weights-too"])
def test_every_stage_of_the_same_shards_has_the_same_bits(extra, recipe, tiny, tmp_path, wanted):
    cases = [Case(*layout, tied=False, extra=extra) for layout in STAGES]  # 287 rows: shards are cut within a row of 8
    assert run_world(2, run_cases, recipe, tiny, cases, tmp_path) == [[], []]
    found = [outcomes_of(case, tmp_path) for case in cases]
    for outcomes in found:
        assert_exact_bytes(outcomes)
        assert_replicas_agree(outcomes)
    whole, *cut = [outcomes[0].result for outcomes in found]  # ddp has whole tensors, and so other noise
    assert all(same_bits(result, cut[0]) for result in cut) and not same_bits(whole, cut[0])
    # near the plain process in fp32: its losses to the rounding of moments, and of weights at 2^-9 of each
    want = wanted(cases[0])
    for got in (whole, cut[0]):
        close = pytest.approx(want.losses, rel=2e-4 if extra is OURS else 5e-3)
        assert got.losses == close and got.losses != want.losses
        errors = {name: relative_error(got.weights[name].float(), want.weights[name]) for name in want.weights}
        assert max(errors.values()) < (2e-3 if extra is OURS else 1e-2), errors


@pytest.mark.slow
@pytest.mark.parametrize("extra", [OURS, LOW], ids=["moments", "weights-too"])
def test_replicas_of_shards_have_the_same_bits(extra, recipe, tiny, tmp_path):
    case = Case("hsdp", 2, 2, micros=3, clips=True, extra=extra)
    assert run_world(4, run_cases, recipe, tiny, [case], tmp_path) == [[]] * 4
    assert_exact_bytes(outcomes_of(case, tmp_path))
    assert_replicas_agree(outcomes_of(case, tmp_path))


def round_by_ranks(recipe, tiny, case, tmp_path):
    """Planted: noise of each rank's own, also where ranks have the same shard."""
    import torch.distributed as dist

    from shardbook.optim import adamw_bf16

    adamw_bf16.shard_number = lambda parameter: dist.get_rank()
    return run_cases(recipe, tiny, [case], tmp_path)


def test_replicas_that_round_apart_are_seen(recipe, tiny, tmp_path):
    case = Case("ddp", 2, 1, extra=OURS)
    run_world(2, round_by_ranks, recipe, tiny, case, tmp_path)
    with pytest.raises(AssertionError):
        assert_replicas_agree(outcomes_of(case, tmp_path))


class Large(Toy):
    """An embedding of which two ranks have quantised state, 64 rows of 64 and more, and blocks too small for it."""

    def __init__(self, vocab=256):
        super().__init__(vocab=vocab, width=64)


class Uneven(Large):
    """The first rank has 64 rows, which are quantised, the second 63, which are not."""

    def __init__(self):
        super().__init__(vocab=127)


def train_8bit(build, vocab):
    """On each rank: what came of the toy, by stage."""
    add_torchao()
    from shardbook.plan.formulas import predict_resident
    from shardbook.ranks.distributed import start_distributed
    from shardbook.run.log.memory import memory_metrics

    rank, by_stage = start_distributed().rank, {}
    torch.compiler.set_stance("force_eager")
    for stage, *sizes in STAGES:
        found = by_stage[stage] = {}

        def note(sharded, optimizer, found=found):
            memory = memory_metrics(sharded, optimizer)
            kept = predict_resident(sharded.layout, rank, "adamw_8bit")
            found["memory"] = [memory[f"memory/{kind}_bytes"] for kind in ("params", "grads", "optimizer")]
            found["predicted"] = [kept.params_bytes, kept.grads_bytes, kept.optimizer_bytes]

        scenario = Scenario(build=build, vocab=vocab, optimizer="adamw_8bit")
        result, _ = train_toy(scenario, stage, *sizes, 5, 0.0, note=note)
        # as lists: a tensor in a pipe is gone with its rank
        found |= {"losses": result.losses, "weights": {name: w.tolist() for name, w in result.weights.items()}}
    return by_stage


@pytest.mark.parametrize("build, vocab", [pytest.param(Large, 256, marks=pytest.mark.slow), (Uneven, 127)])
def test_8_bits_in_every_stage(build, vocab, torchao):
    """Blocks are of shards, so layouts differ; each is near fp32's: a moment is off by 1/64 of its block's largest."""
    want = Scenario(build=build, vocab=vocab).reference(2, 5, 0.0)
    both = run_world(2, train_8bit, build, vocab)
    for stage, *_ in STAGES:
        ranks = [found[stage] for found in both]
        for rank in ranks:
            assert rank["memory"] == rank["predicted"]
            assert rank["losses"] == pytest.approx(want.losses, rel=1e-3) and rank["losses"] != want.losses
            weights = {name: torch.tensor(weight) for name, weight in rank["weights"].items()}
            assert max(relative_error(weights[name], want.weights[name]) for name in weights) < 2e-2
        assert ranks[0]["weights"] == ranks[1]["weights"] and ranks[0]["losses"] == ranks[1]["losses"]


@pytest.fixture(scope="module")
def large(tiny):
    """A model of which some state is quantised on two ranks."""
    path = write_model(tiny / "large", vocab=320, hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    return f"model.path={path}"


def train_eager(words):
    """torchao compiles its step, shape by shape: not in a test of what it computes."""
    add_torchao()
    torch.compiler.set_stance("force_eager")
    return train_rank(words)


def saying_its_room(words):
    """What a run predicts of a checkpoint before it begins, and what each save asks the disk for."""
    from shardbook.run.checkpoint.format import begin
    from shardbook.run.checkpoint.save import predict_bytes

    def print_prediction(job):
        predicted = predict_bytes(job)
        print("predict_bytes", predicted)
        return predicted

    def print_needed(folder, step, needed):
        print("begin", needed)
        return begin(folder, step, needed)

    replace(predict_bytes, print_prediction)
    replace(begin, print_needed)
    return train_eager(words)


def run(size, recipe, name, *words, how=train_eager):
    results = run_world(size, how, [str(recipe), f"run.name={name}", *words])
    assert [code for code, _, _ in results] == [0] * size, results
    return recipe.parent / name, results[0][1]


@pytest.fixture(scope="module")
def trained(recipe, large):
    """Four steps on two ranks, saved at 2 and 4, by the words of the optimizer; made once."""
    made = {}

    def train(extra):
        if extra not in made:
            made[extra], _ = run(2, recipe, f"straight-{len(made)}", *SAVING, large, *extra)
        return made[extra]

    return train


def resumed(trained, extra, recipe, name, size, *words):
    """A run that goes on from step 2 of the one trained with `extra`, and what it printed."""
    folder = recipe.parent / name
    shutil.copytree(trained(extra), folder, ignore=shutil.ignore_patterns("export", "step-000004", "run.json"))
    return run(size, recipe, name, *SAVING, *words)


@pytest.mark.parametrize("extra", [LOW, EIGHT], ids=["moments", "8-bit"])
def test_room_is_asked_for_what_is_written(extra, recipe, large, request):
    """Predicted before a run: all but random states, and up to a part of eight bits' blocks; asked at a save: all."""
    if extra is EIGHT:
        request.getfixturevalue("torchao")
    words = ("train.steps=2", "train.save_steps=2", large, *extra)
    folder, said = run(2, recipe, f"room-{len(extra)}-{extra[0][-4:]}", *words, how=saying_its_room)
    predicted, asked = (int(said.rpartition(f"{name} ")[2].split()[0]) for name in ("predict_bytes", "begin"))
    items = [each for rows in read_stored(folder / "checkpoints" / "step-000002").items.values() for each in rows]
    random = sum(each.length for each in items if each.name.endswith("cpu"))
    written = sum(each.length for each in items)
    assert asked == written and random == 2 * 5056
    assert predicted == written - random or (extra is EIGHT and predicted == pytest.approx(written - random, rel=0.03))


@pytest.mark.parametrize("extra", [OURS, LOW, EIGHT], ids=["moments", "weights-too", "8-bit"])
def test_a_resumed_run_has_the_same_bits(extra, trained, recipe, large, request):
    if extra is EIGHT:
        request.getfixturevalue("torchao")
    folder, printed = resumed(trained, extra, recipe, f"again-{extra[-1].replace('=', '-')}", 2, large, *extra)
    assert "begun anew" not in printed and losses(folder) == losses(trained(extra))
    ours, theirs = (load_file(one / "export" / "model.safetensors") for one in (folder, trained(extra)))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    kept = [metrics(one)[-1]["memory/optimizer_bytes"] for one in (folder, trained(extra))]
    assert kept[0] == kept[1]


def test_ours_goes_on_with_other_ranks(trained, recipe, large):
    folder, printed = resumed(
        trained, OURS, recipe, "other-ranks", 1, large, *OURS, "train.gradient_accumulation_steps=2"
    )
    assert "warning  begun anew: random state: other ranks\n" in printed
    # step 3 has the moments of the checkpoint, and rounds them by other noise: 2^-7 of each, of what step 4 adds
    assert losses(folder)[:3] == pytest.approx(losses(trained(OURS))[:3], rel=1e-6)
    assert losses(folder) == pytest.approx(losses(trained(OURS)), rel=2e-4)


def test_another_optimizer_begins_its_state_anew(trained, recipe, large):
    folder, printed = resumed(trained, (), recipe, "to-bf16", 2, large, *OURS)
    assert "warning  begun anew: optimizer state: of AdamW, here AdamWBf16\n" in printed
    assert losses(folder)[:2] == losses(trained(()))[:2] and len(losses(folder)) == 4
    _, printed = resumed(trained, OURS, recipe, "to-fp32", 2, large)
    assert "warning  begun anew: optimizer state: of AdamWBf16, here AdamW\n" in printed


def test_8_bit_blocks_are_not_cut_anew(trained, recipe, large, torchao):
    folder, printed = resumed(trained, EIGHT, recipe, "blocks", 1, large, *EIGHT, "train.gradient_accumulation_steps=2")
    assert "optimizer state: of AdamW8bit over 2 shards, here AdamW8bit over 1 shards" in printed
    assert len(losses(folder)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_8_bits_beside_an_axis(axis, recipe, tiny, torchao):
    """Resumed to the bit, and by one rank: along pp its blocks are the same ones, along tp they are of parts."""
    model = write_model(tiny / "two", vocab=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    words = (*SAVING, *EIGHT, f"model.path={model}", "train.gradient_accumulation_steps=2")
    straight, _ = run(2, recipe, f"{axis}-straight", *words, f"parallel.{axis}_size=2")
    for world, more in ((2, [f"parallel.{axis}_size=2"]), (1, [])):
        folder = recipe.parent / f"{axis}-{world}"
        shutil.copytree(straight, folder, ignore=shutil.ignore_patterns("export", "step-000004", "run.json"))
        _, printed = run(world, recipe, folder.name, *words, *more)
        anew = "optimizer state: of AdamW8bit over 2 shards, here AdamW8bit over 1 shards" in printed
        assert anew == (axis == "tp" and world == 1)
        assert losses(folder) == (losses(straight) if world == 2 else pytest.approx(losses(straight), rel=1e-2))
