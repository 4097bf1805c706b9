"""Distillation under every stage: the numbers of one plain process with whole logits; a teacher that nothing moves."""

import itertools
import json
import shutil
from dataclasses import replace as replaced
from functools import cache

import pytest
import reference
import torch
from cases import (
    DECAY,
    MAX_NORM,
    RATE,
    TOLERANCE,
    Case,
    assert_events,
    assert_exact_bytes,
    assert_parity,
    assert_replicas_agree,
    documents_of_steps,
    expected_traffic,
    layouts,
    outcomes_of,
    relative_error,
    run_cases,
)
from pipeline_cases import deep
from planted import replace
from safetensors import safe_open
from tiny import write_model
from world import losses, metrics, run_train, run_world, train_rank

from shardbook.run.checkpoint.format import read_stored

TEMPERATURE, RATIO = 2.0, 0.7


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """`tied` has fewer tokens than the untied student, `untied` more than the tied one: what both have is compared."""
    out = tmp_path_factory.mktemp("teachers")
    wider = {"hidden_size": 48, "head_dim": 12, "num_hidden_layers": 4, "initializer_range": 0.2}
    write_model(out / "untied", tied=False, vocab=272, **wider)
    write_model(out / "tied", tied=True, vocab=261, **wider)
    return out


def teacher_of(case: Case) -> str:
    return "untied" if case.tied else "tied"


def words_of(teacher) -> tuple[str, ...]:
    words = ("method=distill", f"distill.teacher={teacher}", f"distill.temperature={TEMPERATURE}")
    return (*words, f"distill.kd_ratio={RATIO}", "train.loss_chunk_tokens=24")


@pytest.fixture(scope="module")
def wanted_of(recipe, models, teachers):
    @cache
    def train(rows: int, clips: bool, folder: str, teacher: str, more: tuple[str, ...], count: int) -> reference.Result:
        load = reference.AutoModelForCausalLM.from_pretrained
        folders = models / folder, teachers / teacher
        both = [load(each, dtype=torch.float64, attn_implementation="eager") for each in folders]
        steps = documents_of_steps(recipe, models, rows, more, count)
        return reference.train_taught(
            *both, steps, TEMPERATURE, RATIO, RATE, DECAY, max_norm=MAX_NORM if clips else 0.0
        )

    def of(case: Case) -> reference.Result:
        more = tuple(word for word in case.extra if word.startswith("data."))
        return train(case.rows, case.clips, case.folder, teacher_of(case), more, case.steps)

    return of


def cases(teachers, quick: bool) -> list[Case]:
    options = itertools.cycle([(1, False, True, "none"), (3, True, False, "full"), (2, False, True, "selective")])
    every = [layout for world in ((2,) if quick else (1, 2, 3, 4)) for layout in layouts(world)]
    if quick:
        every = [layout for layout in every if layout[0] in ("ddp", "zero3")]
    made = []
    for layout, (micros, clips, tied, checkpointing) in zip(every, options, strict=False):
        teacher = teachers / ("untied" if tied else "tied")
        made.append(Case(*layout, micros, clips, tied, checkpointing, extra=words_of(teacher)))
    return made


def teacher_tensors(folder) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def teacher_traffic(case: Case, shapes: dict[str, torch.Size], tied: bool) -> tuple[int, int]:
    """Calls and bytes of a teacher's gathers: forward alone, a block a unit, what is tied in one with the last norm."""
    if case.shards == 1:
        return 0, 0
    units: dict[str, int] = {}
    for name, shape in shapes.items():
        unit = name.split(".")[2] if ".layers." in name else "embedding" if tied or "embed" in name else "head"
        padded = -(-shape[0] // case.shards) * case.shards * shape[1:].numel()
        units[unit] = units.get(unit, 0) + 4 * padded
    times = case.micros if case.stage in ("zero3", "hsdp") else 1
    return times * len(units), times * sum(units.values())


def assert_distilled(case: Case, outcomes, want, teachers) -> float:
    worst = assert_parity(outcomes[0].result, want)
    assert_replicas_agree(outcomes)
    assert_exact_bytes(outcomes)
    shapes = {name: weight.shape for name, weight in want.weights.items()}
    table = expected_traffic(case, shapes, set(want.gradients[0]))
    taught = teacher_tensors(teachers / teacher_of(case))
    calls, size = teacher_traffic(case, {name: t.shape for name, t in taught.items()}, not case.tied)
    if calls:
        own = table["all_gather", "dp_shard"]
        table["all_gather", "dp_shard"] = own[0] + calls, own[1] + size
    measured = {key: (volume.calls, volume.payload_bytes) for key, volume in outcomes[0].traffic[0].items()}
    assert measured == table, f"traffic is not that of {case.stage}: measured {measured}, the table has {table}"
    weights = outcomes[0].result.weights
    for name, tensor in taught.items():
        assert torch.equal(weights[f"teacher.{name}"], tensor), name  # not a bit of it moved
    assert {name for name in weights if name.startswith("teacher.")} == {f"teacher.{name}" for name in taught}
    return worst


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_stage_is_the_plain_process_to_a_millionth(quick, recipe, tiny, teachers, wanted_of, tmp_path):
    chosen = cases(teachers, quick)
    for world in {case.world for case in chosen}:
        those = [case for case in chosen if case.world == world]
        assert run_world(world, run_cases, recipe, tiny, those, tmp_path) == [[]] * world
    for case in chosen:
        assert_distilled(case, outcomes_of(case, tmp_path), wanted_of(case), teachers)


BESIDE = [
    Case("zero3", 1, 1, 2, tp=2, steps=5),
    Case("zero2", 1, 1, 2, tied=False, clips=True, checkpointing="full", tp=2),
    Case("zero1", 1, 1, 2, clips=True, cp=2, steps=5),
    Case("ddp", 1, 1, 3, tied=False, checkpointing="selective", cp=2),
    Case("zero3", 1, 1, 2, clips=True, pp=2, steps=5),
    Case("zero1", 1, 1, 3, tied=False, checkpointing="full", pp=2),
]
BESIDE_TOO = [
    Case("ddp", 1, 1, 2, clips=True, tp=3, extra=("data.max_length=192",)),  # four heads, and uneven vocabularies
    Case("zero3", 1, 2, 2, tied=False, tp=2),
    Case("zero3", 1, 1, 2, clips=True, checkpointing="full", tp=2, cp=2),
    Case("zero2", 1, 1, 2, tied=False, tp=2, pp=2),
    Case("zero3", 1, 1, 2, cp=2, pp=2, schedule="gpipe"),
    Case("hsdp", 2, 1, 3, tied=False, clips=True, pp=2),
    deep("zero2", 1, 1, 4, checkpointing="full", pp=2, chunks=2, schedule="interleaved"),
]


@pytest.mark.parametrize("beside", [BESIDE, pytest.param(BESIDE_TOO, marks=pytest.mark.slow)], ids=["two", "others"])
def test_ranks_that_share_a_model_share_its_teacher(beside, recipe, tiny, teachers, wanted_of, tmp_path):
    """Along tp both have parts of matrices and of the vocabulary, along cp slices of rows; the last stage has all of
    the teacher."""
    chosen = [replaced(case, extra=(*words_of(teachers / teacher_of(case)), *case.extra)) for case in beside]
    for world in {case.world for case in chosen}:
        those = [case for case in chosen if case.world == world]
        assert run_world(world, run_cases, recipe, tiny, those, tmp_path) == [[]] * world
    for case in chosen:
        outcomes, want = outcomes_of(case, tmp_path), wanted_of(case)
        axes = sum(size > 1 for size in (case.tp, case.cp, case.pp))
        worst = assert_parity(outcomes[0].result, want, TOLERANCE if axes == 1 else 4 * TOLERANCE)
        assert_replicas_agree(outcomes)
        assert_exact_bytes(outcomes)
        assert_events(outcomes)
        for name, tensor in teacher_tensors(teachers / teacher_of(case)).items() if case.pp == 1 else ():
            assert torch.equal(outcomes[0].result.weights[f"teacher.{name}"], tensor), name
        print(f"\nworst {worst:.1e}  {case.layout}")


def teacher_of_one_rank():
    """A tensor-parallel rank learns from its own part of a teacher's logits, as if the others had none."""
    from shardbook.parallel import tensor

    real = tensor.VocabParallelHead.logits

    def logits(head, hidden, count=None):
        own = torch.zeros_like(real(head, hidden, count))
        rows = slice(head.first, head.first + len(head.local_weight))
        own[:, rows] = torch.nn.functional.linear(hidden, head.local_weight)[:, : own[:, rows].shape[1]]
        return own

    tensor.VocabParallelHead.logits = logits


def divergence_of_one_rank():
    """Each rank has the divergence of its own tokens alone: the loss is off, no gradient is."""
    from shardbook.parallel import tensor

    real = tensor.VocabParallelHead.gather_parts

    def gather(head, stats):
        return real(head, stats) if len(stats) > 1 else stats[None]

    tensor.VocabParallelHead.gather_parts = gather


def planted(bug, *given):
    bug()
    return run_cases(*given)


@pytest.mark.parametrize("bug", [teacher_of_one_rank, divergence_of_one_rank])
def test_a_part_of_the_teacher_turns_it_red(bug, recipe, tiny, teachers, wanted_of, tmp_path):
    case = replaced(BESIDE[0], steps=2, extra=words_of(teachers / "untied"))
    run_world(2, planted, bug, recipe, tiny, [case], tmp_path)
    with pytest.raises(AssertionError, match=r"e-|e\+|losses|gradient|agree"):
        assert_parity(outcomes_of(case, tmp_path)[0].result, wanted_of(case))


SAVING = ("train.steps=6", "train.save_steps=2", "train.eval_steps=2")


@pytest.fixture(scope="module")
def straight(recipe, teachers):
    return run_train(2, recipe, "straight", *SAVING, *words_of(teachers / "untied"))


def learned(run):
    return [{name: value for name, value in row.items() if name[:5] in ("train", "eval/")} for row in metrics(run)]


def test_likelihood_and_divergence_are_shown_beside_the_loss(straight):
    for what, row in itertools.product(("train", "eval"), metrics(straight)):
        if f"{what}/loss" in row:
            nll, kl = row[f"{what}/nll"], row[f"{what}/kl"]
            assert row[f"{what}/loss"] == pytest.approx((1 - RATIO) * nll + RATIO * TEMPERATURE**2 * kl, rel=1e-6)
    assert learned(straight)[-1]["train/kl"] < learned(straight)[1]["train/kl"]


def test_resumed_it_goes_on_bitwise(recipe, teachers, straight):
    words = words_of(teachers / "untied")
    run_train(2, recipe, "parts", *SAVING, *words, "train.steps=2")
    run = run_train(2, recipe, "parts", *SAVING, *words)
    tail = [row for row in learned(run) if row.get("train/loss")]
    assert tail == [row for row in learned(straight) if row.get("train/loss")]
    ours, theirs = (teacher_tensors(path / "export") for path in (run, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_teacher_is_in_no_checkpoint_and_no_export(tiny, teachers, straight):
    wanted = {name: list(tensor.shape) for name, tensor in teacher_tensors(tiny / "model").items()}
    saved = straight / "checkpoints" / "step-000006"
    assert json.loads((saved / "state.json").read_text())["shapes"] == wanted
    stored = [item.name for items in read_stored(saved).items.values() for item in items]
    assert stored and not [name for name in stored if "teacher" in name]
    assert {name[6:] for name in stored if name.startswith("model.")} == set(wanted)
    exported = {name: list(tensor.shape) for name, tensor in teacher_tensors(straight / "export").items()}
    assert exported == wanted
    taught = reference.AutoModelForCausalLM.from_pretrained(straight / "export")
    assert sum(p.numel() for p in taught.parameters()) == sum(torch.Size(s).numel() for s in wanted.values())


@pytest.mark.parametrize("change", ["a byte", "none"])
def test_a_run_does_not_go_on_with_another_teacher(change, recipe, teachers, straight, tmp_path):
    run, words = straight.parent / f"other-{change[0]}", ["method=sft"]
    wanted = "method was 'distill' there, is 'sft' here; a run keeps what it minimises: choose another run.name"
    shutil.copytree(straight, run, ignore=shutil.ignore_patterns("export", "run.json"))
    if change == "a byte":
        shutil.copytree(teachers / "untied", tmp_path / "other")
        content = bytearray((tmp_path / "other" / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (tmp_path / "other" / "model.safetensors").write_bytes(content)
        words, wanted = list(words_of(tmp_path / "other")), "learned from another teacher"
    asked = [str(recipe), f"run.name={run.name}", *SAVING, *words, "train.steps=8"]
    for code, _, said in run_world(2, train_rank, asked):
        assert code == 2 and wanted in said, said


@pytest.mark.parametrize("words", [(), pytest.param(("lora.modules_to_save=[norm]",), marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", ["zero3", pytest.param("ddp", marks=pytest.mark.slow)])
def test_adapters_learn_from_a_teacher_too(stage, words, recipe, teachers):
    name = f"lora-{stage}-{len(words)}"
    words = (*words_of(teachers / "untied"), "lora.r=4", f"parallel.stage={stage}", *words)
    run = run_train(2, recipe, name, *words, "train.gradient_accumulation_steps=2", "train.save_steps=5")
    row = metrics(run)[1]
    for key in (key for key in row if key.startswith(("predicted/comm/", "predicted/memory/"))):
        if (measured := row.get(key.removeprefix("predicted/"))) is not None and "peak" not in key:
            assert measured == row[key], key
    found = losses(run)
    assert found[-1] < found[0]
    saved = json.loads((run / "checkpoints" / "step-000005" / "state.json").read_text())
    assert saved["base"] and saved["teacher"] and all("lora" in name or "norm" in name for name in saved["shapes"])


@pytest.mark.slow
def test_samples_compile_and_knobs_beside_a_teacher(recipe, teachers):
    plain = run_train(2, recipe, "plain", *words_of(teachers / "untied"))
    asked = ("generate.steps=2", "generate.samples=2", "generate.max_new_tokens=8")
    knobs = {
        "samples": asked,
        "ahead": ("parallel.forward_prefetch=2", "parallel.backward_prefetch=2"),
        "kept": ("parallel.reshard_min_params=8000",),
    }
    for name, words in knobs.items():
        run = run_train(2, recipe, f"knob-{name}", *words_of(teachers / "untied"), *words)
        assert losses(run) == pytest.approx(losses(plain), rel=1e-6), name
        row = metrics(run)[1]
        for op in ("all_gather", "reduce_scatter"):
            for unit in ("bytes", "calls"):
                assert row[f"comm/{op}_{unit}"] == row[f"predicted/comm/{op}_{unit}"], (name, op, unit)


def bug_of(name: str) -> None:
    """Plant it in this process."""
    from shardbook.model import distillation
    from shardbook.optim import build_optimizer as build

    real = distillation.distillation_loss

    def forgets_the_square(logits, theirs, targets, temperature, ratio, trains):
        parts = [real(logits.clone(), theirs.clone(), targets, temperature, only, True)[2] for only in (0.0, 1.0)]
        losses, divergences, _ = real(logits, theirs, targets, temperature, ratio, trains)
        return losses, divergences, (1 - ratio) * parts[0] + ratio * parts[1] / temperature**2

    def the_wrong_way_round(logits, theirs, targets, temperature, ratio, trains):
        losses, _, grad_output = real(logits.clone(), theirs.clone(), targets, temperature, 0.0, True)
        with torch.enable_grad():
            asked = logits.detach().clone().requires_grad_()
            ours = torch.log_softmax(asked[:, : theirs.shape[1]] / temperature, -1)
            found = (ours.exp() * (ours - torch.log_softmax(theirs / temperature, -1))).sum(-1)
            (of_found,) = torch.autograd.grad(found.sum(), asked)
        return losses, found.detach(), (1 - ratio) * grad_output + ratio * temperature**2 * of_found

    def trains_the_teacher(model, *given):
        optimizer = build(model, *given)
        step = optimizer.step

        def steps():
            step()
            with torch.no_grad():
                for parameter in model.teacher.parameters():
                    parameter.mul_(1 - 1e-7)

        optimizer.step = steps
        return optimizer

    if name == "trains_the_teacher":
        replace(build, trains_the_teacher)
    else:
        distillation.distillation_loss = {"square": forgets_the_square, "way": the_wrong_way_round}[name]


def run_planted(name, *args):
    bug_of(name)
    return run_cases(*args)


@pytest.mark.parametrize(
    "name", ["square", *(pytest.param(n, marks=pytest.mark.slow) for n in ("way", "trains_the_teacher"))]
)
def test_a_planted_bug_turns_it_red(name, recipe, tiny, teachers, wanted_of, tmp_path):
    case = Case("zero3", 1, 2, extra=words_of(teachers / "untied"))
    assert run_world(2, run_planted, name, recipe, tiny, [case], tmp_path) == [[], []]
    with pytest.raises(AssertionError):
        assert_distilled(case, outcomes_of(case, tmp_path), wanted_of(case), teachers)


@pytest.mark.parametrize("kernel", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("own", "theirs"), [(101, 101), (101, 90), (90, 101)])
def test_the_head_is_autograd_of_whole_logits(own, theirs, kernel):
    from shardbook.model.distillation import TeacherOutput
    from shardbook.model.loss_head import LossHead

    torch.manual_seed(0)
    tokens, ratio, temperature = 37, 0.3, 1.7
    hidden, said = torch.randn(tokens, 16), torch.randn(tokens, 24)
    weight, taught = torch.randn(own, 16) / 4, torch.randn(theirs, 24) / 4
    targets = torch.randint(0, own, (tokens,))
    hidden, said, weight, taught = (tensor.to(kernel) for tensor in (hidden, said, weight, taught))
    found = []
    for chunk in (0, 5, 37):
        head = LossHead(16, own, bias=False).to(kernel)
        head.weight.data.copy_(weight)
        head.chunk_tokens = chunk
        ours = hidden.clone().requires_grad_()
        teacher = TeacherOutput(said, lambda hidden, count: hidden @ taught[:count].t(), temperature, ratio)
        sums = head(ours, targets, loss=teacher)
        (sums[0] / tokens).backward()
        found.append((sums.detach(), ours.grad, head.weight.grad))
        with torch.no_grad():
            assert torch.equal(head(hidden, targets, loss=teacher), sums)
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    logits, both = exact[0] @ exact[1].t(), min(own, theirs)
    nll = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    wanted = torch.log_softmax((said.double() @ taught.double().t())[:, :both] / temperature, -1)
    got = torch.log_softmax(logits[:, :both] / temperature, -1)
    kl = (wanted.exp() * (wanted - got)).sum()
    loss = (1 - ratio) * nll + ratio * temperature**2 * kl
    (loss / tokens).backward()
    tolerance = 1e-6 if kernel == torch.float32 else 2e-2
    for sums, of_hidden, of_weight in found:
        assert relative_error(sums, torch.stack([loss, nll, kl]).detach()) < tolerance
        assert relative_error(of_hidden, exact[0].grad) < tolerance
        assert relative_error(of_weight, exact[1].grad) < tolerance
