"""Expert parallel through whole runs, under the stages: against one plain transformers process, also where all tokens
choose the experts of one rank; its bytes; planted bugs; and what is refused. Its files: test_experts_files.py."""

import dataclasses
import json

import pytest
import reference
import torch
import transformers
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
from tiny import edit_weights, said_by, write_pairs
from transformers import AutoModelForCausalLM
from world import run_world, train_rank

from shardbook.recipe import load_recipe

EP = "parallel.ep_size=2"
CASES = [
    Case("zero3", 1, 2, 3, True, checkpointing="selective", extra=(EP,)),
    Case("ddp", 2, 1, 2, True, extra=(EP,)),
    Case("zero1", 1, 2, 2, checkpointing="full", extra=(EP,)),
    Case("zero2", 1, 2, 1, extra=(EP, "data.packing=false")),
]
# weights not divided by their sum; multipliers; biases and interleaved gates; a shared expert, which runs after them;
# groups of experts, and a first block without any; matrices the other way round
SORTS = ("qwen3_moe", "granitemoe", "gpt_oss", "qwen2_moe", "deepseek_v3", "aria_text")
NEWEST = ("gpt_oss", "deepseek_v3")
WIDE = [
    Case("zero3", 1, 4, 2, True, extra=(EP,)),
    Case("zero3", 1, 4, 1, checkpointing="full", extra=("parallel.ep_size=4",)),  # one expert a rank
    Case("hsdp", 2, 2, 2, True, extra=(EP,)),
    Case("ddp", 4, 1, 2, extra=(EP,)),
    Case("zero1", 1, 4, 2, extra=(EP,)),
    Case("zero2", 1, 4, 3, True, checkpointing="every:2", extra=(EP,)),
    Case("zero3", 1, 2, 2, True, cp=2, checkpointing="selective", extra=(EP,)),
    Case("ddp", 2, 1, 2, cp=2, extra=("parallel.ep_size=4",)),
    Case("zero3", 1, 2, 4, True, pp=2, checkpointing="full", extra=(EP,)),
    Case("zero1", 1, 2, 4, True, pp=2, schedule="gpipe", extra=(EP,)),
    Case("ddp", 2, 1, 4, pp=2, extra=(EP,)),
]


def assert_experts(folder, cases, recipe, tiny, results):
    for case in cases:
        found = outcomes_of(case, results)
        assert_replicas_agree(found)
        assert_exact_bytes(found)
        if case.cp == 1:  # along cp a block's exchanges are listed together, and experts lie between them
            assert_events(found)
        words = tuple(word for word in case.extra if word.startswith("data."))
        steps = documents_of_steps(recipe, tiny, case.rows, words, case.steps)
        want = reference.train(folder / "model", steps, RATE, DECAY, max_norm=MAX_NORM if case.clips else 0.0)
        assert_parity(found[0].result, want, case=case.name)


@pytest.mark.parametrize(
    "family",
    ["mixtral", *(pytest.param(f, marks=[pytest.mark.slow] + [pytest.mark.newest] * (f in NEWEST)) for f in SORTS)],
)
def test_stages_are_transformers_to_a_millionth(family, recipe, tiny, tmp_path):
    write_family(tmp_path / family / "model", family)
    assert run_world(2, run_cases, recipe, tmp_path / family, CASES, tmp_path) == [[], []]
    assert_experts(tmp_path / family, CASES, recipe, tiny, tmp_path)


class SmallestGap:
    """While it is open, the smallest gap between the last expert that a token of transformers' model chooses and the
    next one, in logits. Where it is as small as their rounding, the token may go to another expert in another layout,
    which is no error, and is a thousand times as far."""

    def __init__(self):
        self.smallest = float("inf")

    def __enter__(self):
        self.hook = torch.nn.modules.module.register_module_forward_hook(self._look)
        return self

    def __exit__(self, *_):
        self.hook.remove()

    def _look(self, module, given, made):
        if type(module).__name__.endswith("Router"):
            logits, _, ids = made
            ordered = logits.detach().sort(dim=1, descending=True).values
            assert torch.equal(ordered[:, : ids.shape[1]], logits.gather(1, ids).sort(dim=1, descending=True).values)
            self.smallest = min(self.smallest, (ordered[:, ids.shape[1] - 1] - ordered[:, ids.shape[1]]).min().item())


@pytest.mark.slow
def test_five_steps_stay_near_those_in_fp64(recipe, tiny, tmp_path):
    write_family(tmp_path / "model", "mixtral")
    cases = [dataclasses.replace(case, steps=5) for case in (CASES[0], CASES[1])]
    assert run_world(2, run_cases, recipe, tmp_path, cases, tmp_path) == [[], []]
    for case in cases:
        steps = documents_of_steps(recipe, tiny, case.rows, (), case.steps)
        with SmallestGap() as gap:
            how = MAX_NORM, torch.float64
            want = reference.train(tmp_path / "model", steps, RATE, DECAY, *how, experts_implementation="eager")
        worst = assert_parity(outcomes_of(case, tmp_path)[0].result, want, case=case.name)
        print(f"{case.name}: {worst:.1e}, and the smallest gap of a router {gap.smallest:.1e}")
        assert gap.smallest > 2e-6, gap.smallest  # logits of some tenths, of sums of 32 products, differ by 1e-7


@pytest.mark.slow
def test_experts_of_another_width_than_their_block(recipe, tiny, tmp_path):
    """Nemotron-H takes tokens to 16 features, through experts, and back; its blocks have 32."""
    folder = tmp_path / "nemotron_h"
    write_family(folder / "model", folder.name, moe_latent_size=16)
    cases = [Case("zero3", 1, 2, 2, True, checkpointing="full", extra=(EP, "data.packing=false"))]
    assert run_world(2, run_cases, recipe, folder, cases, tmp_path) == [[], []]
    assert_experts(folder, cases, recipe, tiny, tmp_path)


@pytest.mark.slow
def test_four_ranks_share_experts_along_every_axis(recipe, tiny, tmp_path):
    write_family(tmp_path / "model", "mixtral")
    assert run_world(4, run_cases, recipe, tmp_path, WIDE, tmp_path) == [[]] * 4
    assert_experts(tmp_path, WIDE, recipe, tiny, tmp_path)


TWICE = 2e-6  # two runs in fp32, each as far from one in fp64 as TOLERANCE says


@pytest.mark.slow
def test_what_goes_with_ep_has_the_numbers_that_it_has_without(recipe, tmp_path):
    """Adapters; a teacher; pairs; state and inputs of blocks on the host; the compiler; samples."""
    write_family(tmp_path / "model", "mixtral")
    pairs, teacher = write_pairs(tmp_path / "pairs.jsonl", 24), tmp_path / "model"
    recomputed = {"checkpointing": "full"}
    kinds = [
        ("zero3", {}, ("lora.r=4",)),
        ("zero2", recomputed, ("lora.r=4",)),
        ("zero3", {}, ("method=distill", f"distill.teacher={teacher}", "distill.kd_ratio=0.5")),
        ("zero1", recomputed, ("method=dpo", f"data.train={pairs}", "data.max_length=96")),
        ("zero3", {}, ("offload.optimizer=cpu", "offload.params=cpu")),
        ("zero3", recomputed, ("offload.activations=cpu",)),
        ("zero3", {}, ("train.compile=true", "parallel.reshard_min_params=4000")),
        ("zero2", {}, ("generate.steps=1", "generate.samples=3", "generate.max_new_tokens=5")),
    ]
    both = [[Case(s, 1, 2, 2, extra=(*words, *ep), **more) for ep in ((), (EP,))] for s, more, words in kinds]
    assert run_world(2, run_cases, recipe, tmp_path, [case for pair in both for case in pair], tmp_path) == [[], []]
    for without, case in both:
        found = outcomes_of(case, tmp_path)
        assert_replicas_agree(found)
        assert_exact_bytes(found)
        assert_events(found)
        assert ("all_to_all", "dp_shard") in found[0].traffic[0]
        assert_parity(found[0].result, outcomes_of(without, tmp_path)[0].result, TWICE, case.name)


# -- all tokens choose the experts of one rank

STARVED = [
    Case("zero3", 1, 2, 2, True, checkpointing="selective", extra=(EP,), steps=2),
    Case("ddp", 2, 1, checkpointing="full", extra=(EP,), steps=2),
]


def choose_one_rank(tensors):
    """Biases of routers, after which a token chooses experts 0 and 1 in even blocks, 2 and 3 in odd ones."""
    for name in [name for name in tensors if name.endswith("mlp.router.bias")]:
        is_odd = int(name.split(".")[2]) % 2
        tensors[name] = torch.tensor([-1.0, -1.0, 1.0, 1.0] if is_odd else [1.0, 1.0, -1.0, -1.0]) * 50


def run_noting(*given):
    """Returns what `run_cases` does, and what this rank sent and received in dispatches, as the steps noted it."""
    from shardbook.parallel.sharding import ShardedModel

    real, noted = ShardedModel.take_routing, []

    def take_routing(sharded):
        noted.append(real(sharded))
        return noted[-1]

    ShardedModel.take_routing = take_routing
    return run_cases(*given), noted


def test_a_rank_whose_experts_nobody_chooses(recipe, tiny, tmp_path):
    """Rank 1 receives nothing in even blocks, rank 0 in odd ones; neither waits, and gradients there are zero."""
    edit_weights(write_family(tmp_path / "model", "gpt_oss"), choose_one_rank)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    chosen = []
    for layer in plain.model.layers:
        layer.mlp.router.register_forward_hook(lambda module, given, made: chosen.append({*made[2].flatten().tolist()}))
    plain(input_ids=torch.arange(200)[None])
    assert chosen == [{0, 1}, {2, 3}] * 2
    (errors, noted), (_, others) = run_world(2, run_noting, recipe, tmp_path, STARVED, tmp_path)
    assert not errors
    assert_experts(tmp_path, STARVED, recipe, tiny, tmp_path)
    steps = [(ours, theirs) for ours, theirs in zip(noted, others, strict=True) if ours or theirs]
    assert len(steps) == len(STARVED)  # the first step of each
    for ours, theirs in steps:
        for here, elsewhere in (ours[0::2], theirs[0::2]), (theirs[1::2], ours[1::2]):
            assert not any(rows for splits in elsewhere for rows in splits.tokens_received + splits.choices_received)
            # the worst that a plan knows: all choices of each of 128 tokens, of two ranks; the mean is half of it
            assert all(splits.tokens_received == [128] * 2 for splits in here)
            assert all(splits.choices_received == [2 * 128] * 2 for splits in here)
    layout = place(recipe, tmp_path / "model", 2, [EP]).layout
    assert layout.most_expert_load * 128 * 2 == 2 * 128 * 2
    for gradients in (outcomes_of(case, tmp_path)[0].result.gradients for case in STARVED):
        for number in range(4):
            down = gradients[0][f"model.layers.{number}.mlp.experts.down_proj"].view(4, -1)
            assert (down.norm(dim=1) > 0).tolist() == [number % 2 == 0] * 2 + [number % 2 == 1] * 2


# -- planted bugs

BUGS = {}  # name -> (function, the case it is planted in, what of it is wrong)


def planted_in(case, wrong):
    def note(function):
        BUGS[function.__name__] = (function, dataclasses.replace(case, steps=2), wrong)
        return function

    return note


@planted_in(CASES[0], r"gradient of model.layers.\d.mlp.experts.* at step 1")
def gradient_divided_by_ranks():
    """As if each rank of experts had seen the same tokens. Loss exact in the first step."""
    from shardbook.parallel.sharding import apply_stage

    def apply_and_divide(model, layout, mesh):
        sharded = apply_stage(model, layout, mesh)
        for unit in layout.expert_units:
            unit.handle.set_gradient_divide_factor(float(layout.ep_size))
        return sharded

    replace(apply_stage, apply_and_divide)


@planted_in(CASES[1], "weight model.layers.*gate.weight")
def routing_weights_have_no_gradient():
    """Routers learn nothing. Loss exact in the first step."""
    from shardbook.parallel.experts import ExchangeChoices

    real = ExchangeChoices.backward
    ExchangeChoices.backward = staticmethod(lambda ctx, *given: (0 * real(ctx, *given)[0], None, None, None))


@planted_in(CASES[1], "weight model.layers.*gate.weight")
def gradients_of_weights_return_in_the_order_of_experts():
    """In backward alone, by the order in place of its inverse: loss exact in the first step."""
    from shardbook.parallel import experts

    real = experts.Permute.forward

    def forward(ctx, rows, order, inverse):
        made = real(ctx, rows, order, inverse)
        ctx.save_for_backward(order)
        return made

    experts.Permute.forward = staticmethod(forward)


@planted_in(CASES[1], "gradient of|weight")
def weights_go_out_in_the_order_of_tokens():
    """Each expert has weights of other choices."""
    from shardbook.parallel import experts

    class Permute:
        apply = staticmethod(lambda rows, order, inverse: rows * 1)

    experts.Permute = Permute


@planted_in(CASES[1], "gradient of")
def a_token_has_the_gradient_of_its_first_rank():
    """Backward takes a token's first copy, not all. Loss exact in the first step."""
    from shardbook.parallel import dispatch

    real = dispatch.CopyRows.backward

    def backward(ctx, grad_output):
        ids, order, starts = ctx.saved_tensors
        return (grad_output[order[starts]] if len(ids) else real(ctx, grad_output)[0]), None, None, None

    dispatch.CopyRows.backward = staticmethod(backward)


@planted_in(CASES[1], "gradient of")
def choices_of_another_rank_begin_at_zero():
    """The choices of each rank's tokens are taken for those of the first rank's."""
    from shardbook.parallel.experts import EPGroup

    real = EPGroup.route

    def route(group, ids, experts):
        found = real(group, ids, experts)
        return found._replace(starts=torch.zeros_like(found.starts))

    EPGroup.route = route


@planted_in(CASES[1], "gradient of|weight")
def routing_of_the_block_before():
    """Every second block sends tokens where the one before it sent them."""
    from shardbook.parallel.experts import EPGroup

    real, made = EPGroup.route, []

    def route(group, ids, experts):
        found = real(group, ids, experts)
        if ids.is_meta or not group.process_group:
            return found
        made.append(found)
        if len(made) % 2:
            return found
        if group.noted:  # what it takes for its own
            group.noted[-1] = made[-2].splits
        return made[-2]

    EPGroup.route = route


@planted_in(CASES[0], "traffic: measured")
def copies_counted_as_choices():
    """The plan sends a token to each of its experts, not once to each rank that has some."""
    from shardbook.plan import block_traffic

    real = block_traffic.expert_exchanges

    def expert_exchanges(layout, config, tokens, routing):
        all_of = [splits._replace(tokens_sent=splits.choices_sent) for splits in routing]
        return real(layout, config, tokens, all_of)

    block_traffic.expert_exchanges = expert_exchanges


@planted_in(CASES[1], "weight model.layers.*experts")
def ranks_hold_the_experts_of_rank_0():
    """As after a broadcast of rank 0's: a part of the files is read twice, another never."""
    from shardbook.boxes import local_box

    def first_box(tensor, name=""):
        box, mesh = local_box(tensor, name), getattr(tensor, "device_mesh", None)
        if "ep" not in (getattr(mesh, "mesh_dim_names", None) or ()):
            return box
        each = box.shape[0] // mesh["ep"].size()
        return dataclasses.replace(box, offsets=(box.offsets[0] % each, *box.offsets[1:]))

    replace(local_box, first_box)


@planted_in(CASES[0], "norms at step")
def norm_of_own_experts():
    """Loss and gradient exact, the norm too small, and each rank clips by its own."""
    from torch.distributed.tensor import DTensor

    from shardbook.optim import clip

    def own(gradient):
        is_expert = isinstance(gradient, DTensor) and "ep" in gradient.device_mesh.mesh_dim_names
        return gradient.to_local() if is_expert else gradient

    real = clip.gradient_norm
    clip.gradient_norm = lambda gradients, **more: real([own(each) for each in gradients], **more)


@planted_in(CASES[0], "traffic: measured")
def recomputed_exchanges_not_predicted():
    """A block that runs again sends its rows again; the plan has those of backward alone."""
    from shardbook.plan import block_traffic

    real = block_traffic.expert_exchanges

    def expert_exchanges(*given):
        return tuple((forward, backward, backward) for forward, backward, _ in real(*given))

    block_traffic.expert_exchanges = expert_exchanges


def run_planted(name, *given):
    BUGS[name][0]()
    return run_cases(*given)


QUICK = ("gradient_divided_by_ranks",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in BUGS])
def test_a_planted_bug_turns_it_red(name, recipe, tiny, tmp_path):
    """It runs to its end, and is wrong."""
    write_family(tmp_path / "model", "mixtral")
    _, case, wrong = BUGS[name]
    assert run_world(2, run_planted, name, recipe, tmp_path, [case], tmp_path) == [[], []]
    with pytest.raises(AssertionError, match=wrong) as red:
        assert_experts(tmp_path, [case], recipe, tiny, tmp_path)
    print(f"{name}: {str(red.value).strip().splitlines()[0]}")


# -- without ranks


def test_a_pipeline_stage_without_experts_has_no_number_of_tokens(recipe, tmp_path):
    """At four stages the first has the dense block alone. Every rank describes its layout."""
    from shardbook.plan.block_traffic import describe_experts

    folder = write_family(tmp_path / "model", "qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [0]}))
    words = ["parallel.ep_size=2", "parallel.pp_size=4", "train.gradient_accumulation_steps=4"]
    first, last = (place(recipe, folder, 8, words, rank) for rank in (0, 7))
    told = [describe_experts(each.layout, each.config, each.recipe) for each in (first, last)]
    assert [len(each.layout.expert_units) for each in (first, last)] == [0, 1]
    assert all(line.startswith("2 ranks share 4 experts of a block, 2 on each") for line in told)
    assert ["tokens" in line.partition(";")[2] for line in told] == [False, True]


def test_a_teacher_may_choose_more_experts_than_a_block_of_the_student_has(recipe, tmp_path):
    """Its experts are gathered whole, so no token of it is sent."""
    from shardbook.plan.block_traffic import read_inside

    folder = write_family(tmp_path / "model", "mixtral")
    teacher = write_family(tmp_path / "teacher", "mixtral", num_local_experts=8, num_experts_per_tok=6)
    placed = place(recipe, folder, 2, [EP, "method=distill", f"distill.teacher={teacher}"], teacher=teacher)
    inside = read_inside(placed.layout, placed.config, placed.recipe)
    assert placed.layout.experts == 4 and all(each.experts and not each.beside.experts for each in inside)


def test_biases_of_experts_are_no_matrices(recipe, tmp_path):
    """Muon would make the biases of gpt-oss' experts, [experts, features], orthogonal, and each rank its own part."""
    placed = place(recipe, write_family(tmp_path / "model", "gpt_oss"), 4, ["parallel.ep_size=2"])
    assert not any(flag for unit in placed.layout.expert_units for flag in unit.is_block_matrix)


def test_a_save_copies_experts_whole_where_no_other_rank_has_them(recipe, tmp_path):
    """Under ddp on four ranks with ep 4 each rank writes all of its experts, and a quarter of all else, to a tensor."""
    from shardbook.plan.formulas import predict_copied

    folder = write_family(tmp_path / "model", "mixtral")
    layouts = [place(recipe, folder, 4, ["parallel.stage=ddp", f"parallel.ep_size={ep}"]).layout for ep in (1, 4)]
    alone, shared = (predict_copied(layout, 0, "adamw") for layout in layouts)
    experts = sum(unit.numel for unit in layouts[1].expert_units) * 3 * 4  # gradient and moments, fp32
    dense = sum(unit.numel for unit in layouts[1].units if not unit.is_experts) * 3 * 4
    assert experts + dense // 4 <= shared <= alone


# -- what is refused


def place(recipe, folder, size, words, rank=0, teacher=None):
    """What a rank of a run does before there is a process group."""
    from shardbook.model.families import load_config
    from shardbook.parallel.placement import World, place_model
    from shardbook.recipe import resolve_precision

    asked = resolve_precision(load_recipe(recipe, [f"model.path={folder}", "data.packing=false", *words]), "cpu")
    world, beside = World(size, size, rank, torch.device("cpu")), teacher and load_config(asked.model, teacher, 64)
    return place_model(asked, world, load_config(asked.model, folder, 64), beside)


OTHER = "does more than transformers' experts interface has; set parallel.ep_size=1"
REFUSED = {  # family, ranks, words, line
    "experts": (
        "mixtral",
        3,
        (3,),
        "parallel.ep_size = 3: does not divide the 4 experts of a block; it may be 1, 2, 4",
    ),
    "ranks": ("mixtral", 2, (4,), "parallel.ep_size = 4: does not divide the 2 ranks of dp_shard; it may be 1, 2"),
    "replicas": (
        "mixtral",
        3,
        (2, "parallel.stage=ddp"),
        "parallel.ep_size = 2: does not divide the 3 ranks of dp_replicate; it may be 1, 3",
    ),
    "tp": ("mixtral", 4, (2, "parallel.tp_size=2"), "set parallel.tp_size=1"),
    "dense": ("llama", 2, (2,), "parallel.ep_size = 2: family 'llama' has no stacked experts; set parallel.ep_size=1"),
    "dbrx": ("dbrx", 2, (2,), f"parallel.ep_size = 2: family 'dbrx': DbrxExpertGLU {OTHER}"),
    "llama4": ("llama4_text", 2, (2,), f"parallel.ep_size = 2: family 'llama4_text': Llama4TextExperts {OTHER}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name, recipe, tmp_path):
    family, size, (ep_size, *words), line = REFUSED[name]
    if family == "dbrx" and transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 does not load the config.json that it wrote of DBRX")
    folder = write_family(tmp_path / "model", family)
    message = said_by(place, recipe, folder, size, [f"parallel.ep_size={ep_size}", *words])
    assert message.endswith(line) and "parallel.ep_size" in message, message


def lose_and_narrow(tensors):
    """Of the experts of two blocks one lacks a matrix, another has one that is narrower."""
    del tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    name = "model.layers.2.block_sparse_moe.experts.0.w2.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()


W = "of .experts.*.w"
MISFIT = (
    "weights in {folder} do not fit the model: model.layers.1.mlp.experts.gate_up_proj has shape [0], the model wants "
    f"[384, 32]: its files have 3 {W}1.weight [48, 32], 4 {W}3.weight [48, 32]; model.layers.2.mlp.experts.down_proj "
    f"has shape [0], the model wants [128, 48]: its files have 4 {W}2.weight [32, 47] or [32, 48]"
)


@pytest.mark.parametrize(
    ("edit", "word", "line"), [(None, "parallel.ep_size=4", REFUSED["ranks"][-1]), (lose_and_narrow, EP, MISFIT)]
)
def test_a_run_that_cannot_begin_says_why_on_each_rank(edit, word, line, recipe, tmp_path):
    """Also the rank whose experts are all there, and none waits for another."""
    folder = write_family(tmp_path / "model", "mixtral")
    if edit:
        edit_weights(folder, edit)
    words = [str(recipe), "run.name=refused", f"model.path={folder}", word]
    for code, _, err in run_world(2, train_rank, words):
        assert code == 2 and err == f"shardbook: {line.format(folder=folder)}\n", err
