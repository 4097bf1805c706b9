"""Adapters of stacked experts, also on a base in four bits, under the stages and expert parallel: against transformers
and peft in one plain process; bytes; files both ways; planted bugs; what is refused."""

import dataclasses
import io
import json

import pytest
import reference
import torch
from adapted import train_adapted, with_stacks, words_of, write_adapters
from cases import (
    Case,
    assert_events,
    assert_exact_bytes,
    assert_parity,
    assert_replicas_agree,
    outcomes_of,
    run_cases,
    same_bits,
)
from families import write_family
from test_experts import place
from test_qlora import run_under_cudas_rule
from test_tensor_files import lay_out, saved_tensors
from tiny import said_by, write_pairs
from traced import traced
from transformers import AutoModelForCausalLM
from world import losses, run_train, run_world

peft = pytest.importorskip("peft")

STACKS = ["gate_up_proj", "down_proj"]
EXPERTS = 4
SETTINGS = {
    "r": 8,
    "lora_alpha": 12,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": [f"experts.{name}" for name in STACKS],
}
EP, FOUR, DOUBLE = "parallel.ep_size=2", "model.load_in_4bit=true", "model.bnb_4bit_use_double_quant=true"
# whole blocks of 64
WIDE = dict.fromkeys(
    ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 64
) | {"head_dim": 16}
CASES = [
    Case("zero3", 1, 2, 3, True, checkpointing="selective", extra=(EP,)),
    Case("ddp", 2, 1, 2, True, extra=(EP,)),
    Case("zero1", 1, 2, 2, checkpointing="full", extra=(EP,)),
    Case("zero2", 1, 2, 1),
    Case("zero3", 1, 2, 2, True, checkpointing="full"),
]
FOUR_RANKS = [
    Case("zero3", 1, 4, 2, True, checkpointing="selective", extra=(EP,)),
    Case("hsdp", 2, 2, 2, extra=(EP,)),
    Case("ddp", 4, 1, 1, extra=("parallel.ep_size=4",)),
    Case("zero3", 1, 2, 2, True, cp=2, extra=("parallel.ep_size=4",)),
    Case("zero3", 1, 2, 4, pp=2, checkpointing="full", extra=(EP,)),
]
# a shared expert beside; matrices the other way round, and biases
FAMILIES = ["mixtral", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen2_moe", "gpt_oss"))]


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def write_base(folder, family: str, is_rounded: bool):
    """A family's model in `folder`/model and, beside it, what peft trains (with the packed matrices in NF4), and an
    adapter of peft's."""
    write_family(folder / "model", family, **(WIDE if is_rounded else {}))
    model = plain_model(folder / "model")
    if is_rounded:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("_proj.weight", "_expert_gate.weight", "experts.gate_up_proj", "experts.down_proj")):
                    parameter.copy_(reference.nf4(parameter))
    model.save_pretrained(folder / "plain")
    write_adapters(folder, {"adapter": (SETTINGS,)}, lambda kind: plain_model(folder / "plain"))
    return folder


def with_adapter(folder, cases: list[Case], *words: str) -> list[Case]:
    return [
        dataclasses.replace(each, extra=(*each.extra, *words_of(SETTINGS, folder / "adapter"), *words))
        for each in cases
    ]


def wanted_of(folder, recipe, tiny, case: Case) -> reference.Result:
    """What peft makes of it, by our names; of a base in four bits the adapters alone are compared."""
    result = train_adapted(
        plain_model(folder / "plain"),
        folder / "adapter",
        recipe,
        tiny,
        case,
        lambda tensors: with_stacks(tensors, STACKS, EXPERTS),
    )
    if FOUR in case.extra:
        result.weights = {name: tensor for name, tensor in result.weights.items() if "lora" in name}
    return result


def assert_as_peft(folder, cases: list[Case], recipe, tiny, results) -> None:
    wanted = {}
    for case in cases:
        found = outcomes_of(case, results)
        assert_replicas_agree(found)
        assert_exact_bytes(found)
        if case.cp == 1:
            assert_events(found)
        key = case.rows, case.clips
        if key not in wanted:
            wanted[key] = wanted_of(folder, recipe, tiny, case)
        assert_parity(found[0].result, wanted[key], case=case.name)
        trained = {name.rpartition(".experts.")[2] for name in found[0].result.gradients[0] if ".experts." in name}
        assert trained == {f"{stack}_lora_{letter}" for stack in STACKS for letter in "AB"}


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_are_peft_to_a_millionth(family, recipe, tiny, tmp_path):
    folder = write_base(tmp_path, family, False)
    cases = with_adapter(folder, CASES)
    assert run_world(2, run_cases, recipe, folder, cases, tmp_path) == [[], []]
    assert_as_peft(folder, cases, recipe, tiny, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_four_bits_they_are_peft_on_the_rounded_base(family, recipe, tiny, tmp_path):
    folder = write_base(tmp_path, family, True)
    cases = with_adapter(folder, CASES, FOUR)
    assert run_world(2, run_cases, recipe, folder, cases, tmp_path) == [[], []]
    assert_as_peft(folder, cases, recipe, tiny, tmp_path)
    for case in cases:
        kept = outcomes_of(case, tmp_path)[0].result.weights
        assert not any(name.endswith(("_proj.weight", *STACKS)) for name in kept)
        assert kept["model.layers.0.mlp.experts.down_proj_packed"].shape[0] == EXPERTS * 64


def test_bytes_arrive_where_copies_know_only_one_nan(recipe, tmp_path):
    """Whatever CUDA does to numbers of bf16: every result is the same."""
    folder = write_base(tmp_path, "mixtral", True)
    layouts = [Case("zero3", 1, 2, 2, extra=(EP,)), Case("zero3", 1, 2, 2)]
    cases = with_adapter(folder, layouts, FOUR, "precision.params=bf16")
    plain, ruled = tmp_path / "as it is", tmp_path / "ruled"
    plain.mkdir(), ruled.mkdir()
    assert run_world(2, run_cases, recipe, folder, cases, plain) == [[], []]
    assert [errors for errors, _ in run_world(2, run_under_cudas_rule, recipe, folder, cases, ruled)] == [[], []]
    for case in cases:
        found = outcomes_of(case, ruled)
        assert same_bits(found[0].result, outcomes_of(case, plain)[0].result)
        assert_exact_bytes(found)


@pytest.mark.slow
@pytest.mark.parametrize("four", [(), (FOUR,)], ids=["whole", "four bits"])
def test_four_ranks_share_them_along_every_axis(four, recipe, tiny, tmp_path):
    folder = write_base(tmp_path, "mixtral", bool(four))
    cases = with_adapter(folder, FOUR_RANKS, *four)
    assert run_world(4, run_cases, recipe, folder, cases, tmp_path) == [[]] * 4
    assert_as_peft(folder, cases, recipe, tiny, tmp_path)


@pytest.mark.slow
def test_what_goes_with_them_has_the_numbers_that_it_has_without(recipe, tmp_path):
    """The compiler, where it can; pairs, whose reference is the base alone; two bytes a scale; inputs on the host."""
    folder = write_base(tmp_path, "mixtral", True)
    pairs = write_pairs(tmp_path / "pairs.jsonl", 24)
    plain, four = (with_adapter(folder, [Case("zero3", 1, 2, 2, True)], *words)[0] for words in ((), (FOUR,)))
    begun = Case("zero3", 1, 2, 2, True, extra=("lora.r=8", TARGETS))
    recomputed = {"checkpointing": "full"}
    dpo = ("method=dpo", f"data.train={pairs}", "data.max_length=96")
    kinds = [
        (plain, plain, ("train.compile=true",), {}),
        (plain, plain, ("train.compile=true",), recomputed),
        (four, four, ("train.compile=true",), {}),
        (four, four, ("offload.activations=cpu",), recomputed),
        (plain, with_words(plain, dpo), (*dpo, EP), recomputed),
        (four, with_words(four, dpo), (*dpo, EP), recomputed),
        (begun, with_words(begun, dpo), (*dpo, "preference.precompute_ref_log_probs=false"), {}),
        (four, with_words(four, (DOUBLE,)), (DOUBLE, EP), recomputed),
    ]
    both = [(other, with_words(case, words, **more)) for case, other, words, more in kinds]
    every = list(dict.fromkeys(case for pair in both for case in pair))
    assert run_world(2, traced, run_cases, recipe, folder, every, tmp_path) == [[], []]
    for without, case in both:
        found = outcomes_of(case, tmp_path)
        assert_replicas_agree(found)
        assert_exact_bytes(found)
        assert_parity(found[0].result, without_bytes(outcomes_of(without, tmp_path)[0].result), TWICE, case.name)


TWICE = 2e-6  # two runs in fp32, each as far from one in fp64 as TOLERANCE says


def with_words(case: Case, words: tuple[str, ...], **more) -> Case:
    return dataclasses.replace(case, extra=(*case.extra, *words), **more)


def without_bytes(result: reference.Result) -> reference.Result:
    """Packed bytes are no numbers."""
    numbers = {n: w for n, w in result.weights.items() if not n.endswith(("_packed", "_absmax"))}
    return dataclasses.replace(result, weights=numbers)


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 60)[None]).logits


@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_files_go_both_ways(family, recipe, tmp_path):
    """Peft goes on where ranks that shared experts ended, and they where peft did; what is merged is one model."""
    from shardbook.cli import main

    folder = write_base(tmp_path, family, False)
    start = (f"model.path={folder / 'model'}", "train.save_steps=1", "data.eval_size=0", "train.export=true")
    words = (*start, *words_of(SETTINGS, folder / "adapter"))
    run = run_train(2, recipe, f"{family}-out", "train.steps=2", EP, *words)
    settings = json.loads((run / "export" / "adapter_config.json").read_text())
    place = "mlp.experts"
    assert settings["target_parameters"] == sorted(f"{place}.{stack}" for stack in STACKS)
    model = peft.PeftModel.from_pretrained(plain_model(folder / "model"), run / "export").eval()
    assert main(["export", str(run), "--merge", "--dtype", "fp32", "--out", str(tmp_path / "merged")]) == 0
    assert main(["export", str(run), "--out", str(tmp_path / "again")]) == 0
    again = peft.PeftModel.from_pretrained(plain_model(folder / "model"), tmp_path / "again").eval()
    want = logits_of(model)
    assert torch.equal(logits_of(again), want)
    merged = plain_model(tmp_path / "merged")
    assert (logits_of(merged) - want).norm() < 1e-6 * want.norm()
    assert (logits_of(model.merge_and_unload()) - want).norm() < 1e-6 * want.norm()
    assert (logits_of(plain_model(folder / "model")) - want).norm() > 1e-2 * want.norm()
    # a third step from the files, and from the run
    more = ("train.steps=1", *start, *words_of(SETTINGS, run / "export"))
    one, shared = (run_train(1 + bool(ep), recipe, f"{family}-on{len(ep)}", *more, *ep) for ep in ((), (EP,)))
    assert (
        saved_tensors(one / "checkpoints" / "step-000001").keys()
        == saved_tensors(shared / "checkpoints" / "step-000001").keys()
    )


def move_adapters(words, recipe, source, out) -> None:
    """On each rank: load a checkpoint of adapters and save what was loaded, to `out`."""
    from shardbook.ranks.distributed import start_distributed
    from shardbook.run.checkpoint.load import load_checkpoint
    from shardbook.run.checkpoint.save import save_checkpoint

    start_distributed()
    sharded, optimizer = lay_out(words, recipe)
    sharded.model.identity = json.loads((source / "state.json").read_text())["base"]
    state, _ = load_checkpoint(source, sharded, optimizer)
    save_checkpoint(out, sharded, optimizer, state, 0)


@pytest.mark.parametrize("four", [(), (FOUR,)], ids=["whole", "four bits"])
def test_resume_is_bitwise_also_where_other_ranks_share_them(four, recipe, tmp_path):
    """Ep 2 to ep 4 to one process, model and moments; and a run that was cut goes on to the same losses."""
    folder = write_base(tmp_path, "mixtral", True)
    words = (f"model.path={folder / 'model'}", "optim.lr_scheduler_type=constant", "train.save_steps=2", *four)
    words = (*words, *words_of(SETTINGS, folder / "adapter"))
    name = f"stacks{len(four)}"
    straight = run_train(2, recipe, f"{name}-whole", "train.steps=4", EP, *words)
    run_train(2, recipe, f"{name}-parts", "train.steps=2", EP, *words)
    resumed = run_train(2, recipe, f"{name}-parts", "train.steps=4", EP, *words)
    assert losses(resumed)[-2:] == losses(straight)[-2:]
    newest = straight / "checkpoints" / "step-000004"
    wanted = saved_tensors(newest)
    assert all("lora" in key for key in wanted)
    for number, (world, more) in enumerate([(4, ["parallel.ep_size=4"]), (1, []), (2, [EP, "parallel.stage=ddp"])]):
        run_world(world, move_adapters, [*words, *more], recipe, newest, tmp_path / str(number))
        newest = tmp_path / str(number) / "step-000004"
        found = saved_tensors(newest)
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_what_begins_is_the_base_on_any_number_of_ranks(recipe, tmp_path):
    """B is 0, and A the same numbers whoever has them."""
    write_family(tmp_path / "model", "mixtral")
    words = (f"model.path={tmp_path / 'model'}", "train.steps=1", "train.save_steps=1", "optim.learning_rate=1e-30")
    targets = "lora.target_parameters=[experts.gate_up_proj, experts.down_proj]"
    runs = [
        run_train(world, recipe, f"begin{world}", *words, "lora.r=8", targets, *more)
        for world, more in ((1, ["train.gradient_accumulation_steps=2"]), (2, [EP]))
    ]
    one, two = (saved_tensors(run / "checkpoints" / "step-000001") for run in runs)
    low = [key for key in one if key.endswith("proj_lora_A") and "model" in key]
    assert low and all(torch.equal(one[key], two[key]) and one[key].abs().max() > 0 for key in low)


# -- planted bugs

BUGS = {}  # name -> (function, whether the base is in four bits, what is wrong)


def planted_in(is_rounded, wrong):
    def note(function):
        BUGS[function.__name__] = (function, is_rounded, wrong)
        return function

    return note


@planted_in(False, "losses at step|weight")
def expert_major_columns():
    """B of peft's files read as if an expert's columns lay beside each other."""
    from shardbook.model.adapter_files import HIGH_STACK, PeftNames

    def from_file(names, name, tensor):
        if not name.endswith(HIGH_STACK):
            return tensor
        return tensor.unflatten(1, (names.stacks[name], -1)).permute(1, 0, 2).flatten(0, 1)

    PeftNames.from_file = from_file


@planted_in(False, "gradient of")
def scaled_in_forward_alone():
    from shardbook.model import expert_products

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, factor):
            return rows * factor

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output, None

    real = expert_products.grouped_linear

    class Low(torch.Tensor):
        def __mul__(self, factor):
            return Scaled.apply(self.as_subclass(torch.Tensor), factor)

    def grouped_linear(rows, weight, offsets, *more):
        output = real(rows, weight, offsets, *more)
        return output.as_subclass(Low) if not more and weight.shape[1] == SETTINGS["r"] else output

    expert_products.grouped_linear = grouped_linear


@planted_in(True, "losses at step|gradient of")
def bytes_of_the_expert_before():
    from shardbook.model import expert_products

    real = expert_products._multiply

    def multiply(rows, packed, *others):
        return real(rows, packed.roll(1, 0), *others)

    expert_products._multiply = multiply


@planted_in(True, "gradient of")
def transposed_in_backward_alone():
    """Which of two dims of a square matrix is summed over is not in its shape. Loss exact in the first step."""
    from shardbook.model import expert_products

    real = expert_products._multiply

    def multiply(rows, *given):
        *others, is_transposed, again = given
        return real(rows, *others, is_transposed ^ (again and others[0].shape[1] == 64), again)

    expert_products._multiply = multiply


@planted_in(False, "losses at step|gradient of")
def updates_of_the_expert_before():
    from shardbook.model import expert_products

    real = expert_products.grouped_linear

    def grouped_linear(rows, weight, offsets, *more):
        return real(rows, weight if more else weight.roll(1, 0), offsets, *more)

    expert_products.grouped_linear = grouped_linear


def run_planted(name, *given):
    BUGS[name][0]()
    return run_cases(*given)


QUICK = ("expert_major_columns", "bytes_of_the_expert_before")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in BUGS])
def test_a_planted_bug_turns_it_red(name, recipe, tiny, tmp_path):
    """It runs to its end, and is wrong."""
    _, is_rounded, wrong = BUGS[name]
    folder = write_base(tmp_path, "mixtral", is_rounded)
    case = dataclasses.replace(CASES[1], steps=2)
    cases = with_adapter(folder, [case], *[FOUR] * is_rounded)
    assert run_world(2, run_planted, name, recipe, folder, cases, tmp_path) == [[], []]
    with pytest.raises(AssertionError, match=wrong) as red:
        assert_as_peft(folder, cases, recipe, tiny, tmp_path)
    print(f"{name}: {str(red.value).strip().splitlines()[0]}")


# -- what is refused

TARGETS = "lora.target_parameters=[experts.gate_up_proj, experts.down_proj]"
REFUSED = {
    (
        "lora.r=12",
        TARGETS,
    ): "r = 12: must be a multiple of 8 where target_parameters is set: products of all experts take "
    "rows of 16 bytes; set lora.r=16",
    ("lora.r=8", TARGETS, "lora.use_dora=true"): "use_dora = true: updates of stacked experts (target_parameters) have",
    (
        "lora.r=8",
        TARGETS,
        "lora.lora_dropout=0.1",
    ): "lora_dropout = 0.1: updates of stacked experts",
    (TARGETS,): "r = 0 and target_parameters is set",
    ("lora.r=8", "lora.target_parameters=[experts.w1]"): "'experts.w1' is no stack of experts; there are "
    "['mlp.experts.gate_up_proj', 'mlp.experts.down_proj']",
    ("lora.r=8", "lora.target_parameters=[perts.down_proj]"): "'perts.down_proj' is no stack of experts",
    (
        "lora.r=8",
        FOUR,
        "train.compile=true",
        "activation.checkpointing=full",
    ): "train.compile = true with experts in",
    (
        "lora.r=8",
        FOUR,
        "parallel.pp_size=2",
        "parallel.pipeline_schedule=interleaved",
        "parallel.pipeline_chunks=2",
        "train.gradient_accumulation_steps=2",
    ): "pipeline_schedule = interleaved with experts in four bits",
    ("lora.r=8", "lora.target_modules=[experts]"): "experts are stacked: set lora.target_parameters=",
    ("lora.r=8", "lora.target_modules=[gate_up_proj]"): 'set lora.target_parameters=["mlp.experts.gate_up_proj"]',
    ("lora.r=8", TARGETS, "lora.target_modules=[]", EP): "nothing before the first experts is trained",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(words, recipe, tmp_path):
    folder = write_family(tmp_path / "model", "mixtral", **WIDE)
    assert REFUSED[words] in said_by(place, recipe, folder, 2, words)


def test_a_dense_model_has_no_stacks(recipe, tiny):
    said = said_by(place, recipe, tiny / "model", 1, ["lora.r=8", TARGETS])
    assert "family 'llama' has no stacked experts that can be adapted; leave it out" in said


def test_the_start_says_how_many_numbers_of_the_whole_model_are_trained(recipe, tmp_path):
    """Not of a rank, which has half of the experts."""
    folder = write_base(tmp_path, "mixtral", True)
    text = summary_of(place(recipe, folder / "model", 2, [*words_of(SETTINGS, folder / "adapter"), EP, FOUR]))
    trained = sum(parameter.numel() for parameter in peft_parameters(folder))
    assert f"; {trained:,} of them trained, the others at rest in fp32, matrices of blocks in four bits " in text


@pytest.mark.parametrize("family", ["dbrx", "jetmoe"])
def test_the_start_says_which_experts_are_not_in_four_bits(family, recipe, tmp_path):
    folder = write_family(tmp_path, family, **WIDE, d_model=64)
    text = summary_of(place(recipe, folder, 1, ["lora.r=8", FOUR]))
    assert "matrices of blocks in four bits but for experts, which are not behind transformers' interface" in text


def summary_of(placed) -> str:
    """The effective layout, as the start of a run shows it."""
    from types import SimpleNamespace

    from rich.console import Console

    from shardbook.run.job_summary import describe_layout

    facts = {key: getattr(placed, key) for key in ("layout", "recipe", "config", "model", "attention")}
    batching, loader = SimpleNamespace(dp_size=2, batch_size=1), SimpleNamespace(accumulation=1, rows_per_step=2)
    job = SimpleNamespace(**facts, peak=None, batching=batching, loader=loader, steps=1, no_plan_reason="not asked")
    console = Console(width=300, file=io.StringIO())
    console.print(describe_layout(job))
    return console.file.getvalue()


def peft_parameters(folder):
    settings = peft.LoraConfig(task_type="CAUSAL_LM", **SETTINGS)
    model = peft.get_peft_model(plain_model(folder / "plain"), settings)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
