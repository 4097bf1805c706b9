"""`shard_model` with tensor parallel: models of transformers by their own plans, and a module by one of its caller's,
under the stages, against one plain process; bytes as `plan_module` says; what a wrong plan is told."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from cases import TOLERANCE, assert_parity, relative_error, whole
from planted import replace
from reference import EPS, Result, descend
from tiny import config
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from world import run_world

from shardbook import Parallel, Precision, RecipeError, plan_module, shard_model

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
STEPS, MICROS, LENGTH, RATE, DECAY, MAX_NORM = 3, 2, 9, 3e-3, 0.1, 0.5
WORDS = 47  # an odd number: ranks have shares of 24 and 23


class Block(nn.Module):
    """An MLP that is computed again in backward. The gate's gradient is a part of it on each rank."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.gate = nn.Linear(1, 1)

    def mix(self, x):
        inner = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(inner * self.gate(inner.new_ones(1)))

    def forward(self, x):
        return checkpoint(self.mix, x, use_reentrant=False)


class Words(nn.Module):
    """A model of one's own, with a head that has as many rows as its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


PARTIAL = "replicated_with_grad_allreduce"
GATE = ("layers.*.gate.weight", "layers.*.gate.bias")
FUSED = {"layers.*.both": "colwise", "layers.*.down": "rowwise"}
GATHERED = {"layers.*.both": "colwise_gather_output", "layers.*.down": "rowwise_split_input"}
PLAN = {
    "layers.*.up": "colwise",
    "layers.*.gate": PARTIAL,
    "layers.*.down": "rowwise",
    "embedding": "embedding_rowwise",
    "head": "colwise_gather_output",
}


def of_transformers(family, **changes):
    def build():
        torch.manual_seed(0)
        facts = config(family, attn_implementation="eager", **changes)
        return AutoModelForCausalLM.from_config(facts, dtype=torch.float32)

    return build


def mine():
    torch.manual_seed(0)
    return Words()


# stage, model, plan; on four ranks, two along tp
CASES = {
    "llama": ("zero3", of_transformers("llama"), None),
    "norms of heads": ("zero2", of_transformers("qwen3", tied=False), None),
    "outputs gathered, inputs split": ("ddp", of_transformers("phi3"), None),
    "another family's": ("zero1", of_transformers("olmo2"), None),
    "one's own": ("zero3", mine, PLAN),
}


# one plain process in fp32 is 8.6e-7 from one in fp64, where the others are 2.5e-7 to 4.5e-7
ROUNDING = {"another family's": 2e-6}


def blocks_of(model):
    return model.layers if hasattr(model, "layers") else model.model.layers


def row_of(step, rank, micro):
    return torch.randint(0, WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro))


def loss_of(model, ids, labels=None):
    """Summed loss of a row's predictions."""
    output = model(input_ids=ids)
    logits = getattr(output, "logits", output)[0, :-1]
    return nn.functional.cross_entropy(logits, (ids if labels is None else labels)[0, 1:], reduction="sum")


def train(name: str, folder: Path, data_ranks: int, compiled: bool = False, all_last: bool = False):
    """A case on this rank. Returns what a step sends, and the number of parameters at rest."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from shardbook import clip_gradients
    from shardbook.comm.ledger import Ledger
    from shardbook.plan.formulas import predict_traffic

    stage, build, plan = CASES[name]
    rank, model, mesh = dist.get_rank(), build(), None
    if plan:
        mesh = init_device_mesh("cpu", (data_ranks, 2), mesh_dim_names=("dp_shard", "tp"))
    if compiled:
        for block in blocks_of(model):
            block.compile(backend="aot_eager")
    parallel = stage if mesh else Parallel(stage=stage, tp_size=2)
    sharded = shard_model(model, blocks=blocks_of(model), stage=parallel, mesh=mesh, tp_plan=plan)
    decays = [[p for p in model.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False)]
    groups = [{"params": ps, "weight_decay": decay} for ps, decay in zip(decays, (DECAY, 0.0), strict=True)]
    optimizer, result = torch.optim.AdamW(groups, lr=RATE, eps=EPS, fused=True), Result([], [], [], {})
    dp_rank = sharded.layout.data_rank(rank).dp_rank
    for step in range(STEPS):
        total = torch.zeros(())
        with Ledger(sharded.layout.groups(rank)) as ledger:
            if step == STEPS - 1:
                ledger.open()
            for micro in range(MICROS):
                with sharded.micro_batch(is_last=all_last or micro == MICROS - 1):
                    loss = loss_of(model, row_of(step, dp_rank, micro)) / (data_ranks * MICROS * (LENGTH - 1))
                    loss.backward()
                total += loss.detach()
            gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
            norm = clip_gradients(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        result.losses.append(total.item() / 2)
        result.gradients.append(gradients)
        result.norms.append(norm.item())
    result.weights = {name: whole(p) for name, p in model.named_parameters()}
    torch.save(result, folder / f"{name}.{rank}")
    numel = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    return ledger.traffic, without_loop(predict_traffic(sharded.layout, MICROS), sharded.layout), numel


def train_all(names, folder, data_ranks):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return {name: train(name, folder, data_ranks) for name in names}


@cache
def expected_of(name, data_ranks):
    model = CASES[name][1]().double()  # two roundings, the reference's and ours, would reach the bound between them

    def loss(step):
        parts = [loss_of(model, row_of(step, rank, micro)) for rank in range(data_ranks) for micro in range(MICROS)]
        return sum(parts) / (data_ranks * MICROS * (LENGTH - 1))

    return descend(model, loss, STEPS, RATE, DECAY, MAX_NORM)


def without_loop(traffic, layout):
    """Predicted traffic, but for the counts and flags that a recipe's loop sums."""
    from shardbook.comm.ledger import Volume
    from shardbook.plan.events import COUNTS_BYTES, FLAGS_BYTES

    everyone = next((axis for axis, size in layout.sizes.items() if size == layout.world_size), "world")
    left = traffic["all_reduce", everyone] + Volume(-2, -COUNTS_BYTES - FLAGS_BYTES)
    return {key: volume for key, volume in (traffic | {("all_reduce", everyone): left}).items() if volume.calls}


@cache
def planned(name, ranks):
    """What `plan_module` says of a case, without ranks."""
    stage, build, plan = CASES[name]
    model, precision = build(), Precision(params="fp32")
    facts = {"stage": Parallel(stage=stage, tp_size=2), "precision": precision, "tp_plan": plan}
    step = plan_module(
        model, blocks=blocks_of(model), batch=row_of(0, 0, 0), gpus=ranks, micros=MICROS, loss=loss_of, **facts
    )
    assert not step.unmeasured
    return step


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library_tp")
    return folder, run_world(4, train_all, list(CASES), folder, 2)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_computes_what_one_process_does(name, trained):
    folder, ranks = trained
    step = planned(name, 4)
    sent_in_layers = {key: volume for key, volume in step.traffic.items() if key[1] == "tp"}
    for rank, results in enumerate(ranks):
        got = torch.load(folder / f"{name}.{rank}", weights_only=False)
        assert_parity(got, expected_of(name, 2), ROUNDING.get(name, TOLERANCE))
        traffic, predicted, numel = results[name]
        assert traffic == predicted | sent_in_layers, rank
        assert 4 * numel <= step.resident.params_bytes  # of the first rank, which has the most of what is uneven
    assert ranks[0][name][0] == without_loop(step.traffic, step.layout)


def gradients_are_not_checked():
    from shardbook.parallel.same_on_ranks import FirstSteps

    FirstSteps.check = lambda self: False


def gradients_of_inputs_stay_parts():
    from shardbook.comm.collectives import SumGradients

    SumGradients.backward = staticmethod(lambda ctx, grad_output: (grad_output, None))
    gradients_are_not_checked()


def every_rank_adds_the_bias():
    from shardbook.parallel.tensor_linears import ShardedLinear

    def forward(self, input):
        computed = self.compute(input, self.local.get("bias"))
        return self.tp_group.sum_parts(computed) if self.is_row_parallel else computed

    ShardedLinear.forward = forward


def parts_become_their_mean():
    from shardbook.parallel import tensor_plan

    replace(tensor_plan.has_whole_gradient, lambda name, words: True)
    gradients_are_not_checked()


def gathered_features_have_gradients_of_all():
    from shardbook.parallel.tensor_plan import GatherFeatures

    def backward(ctx, grad_output):
        return 2 * grad_output[..., ctx.share], None, None  # as an all-gather's own: each rank's loss for itself

    GatherFeatures.backward = staticmethod(backward)


BUGS = (
    gradients_of_inputs_stay_parts,
    every_rank_adds_the_bias,
    parts_become_their_mean,
    gathered_features_have_gradients_of_all,
)


def train_with(bug, folder):
    import torch.distributed as dist

    bug()
    dist.init_process_group("gloo")
    return train("one's own", folder, 1)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_turns_it_red(bug, tmp_path):
    run_world(2, train_with, bug, tmp_path)
    with pytest.raises(AssertionError):
        assert_parity(torch.load(tmp_path / "one's own.0", weights_only=False), expected_of("one's own", 1))


def train_compiled(folder):
    import torch._dynamo.utils
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for name in ("llama", "one's own"):
        train(name, folder, 1, compiled=True)
    counters = torch._dynamo.utils.counters
    return dict(counters["graph_break"]), counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_compiled_blocks_have_no_break(tmp_path):
    """Two ranks, along tp alone: a group of one rank along dp_shard."""
    for rank, (breaks, graphs) in enumerate(run_world(2, train_compiled, tmp_path)):
        assert not breaks and graphs >= 2
        for name in ("llama", "one's own"):
            assert_parity(torch.load(tmp_path / f"{name}.{rank}", weights_only=False), expected_of(name, 1))


def run_example():
    code = re.search(r"```python\n(.*?)```", PAGE.read_text().partition("## Tensor parallel")[2], re.S)[1]
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    gradients = {name: whole(p.grad).tolist() for name, p in names["model"].named_parameters()}
    clips = torch.nn.utils.clip_grad_norm_
    with pytest.raises(RuntimeError, match="must have the same mesh"):
        clips(names["model"].parameters(), 1.0)
    return names["loss"].item(), gradients, {name: whole(p).tolist() for name, p in names["model"].named_parameters()}


def test_the_example_of_the_page_computes_what_one_process_does():
    """The reference: the same module under no stage, in this process."""
    code = re.search(r"(class Layer.*?)\n\n\ndist", PAGE.read_text().partition("## Tensor parallel")[2], re.S)[1]
    names = {"nn": nn}
    exec(code, names)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 64), *(names["Layer"]() for _ in range(4)), nn.Linear(64, 100))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 100, (8, 33), generator=torch.Generator().manual_seed(0))
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for got, gradients, weights in run_world(2, run_example):
        assert got == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            assert relative_error(torch.tensor(gradients[name]), parameter.grad) < 1e-5, name
            # the first step of AdamW is the sign of a gradient, so one near 0 may go the other way
            assert relative_error(torch.tensor(weights[name]), parameter.detach()) < 1e-3, name


def shard_and_step(model, data_of=lambda rank: 0, labels_of=None, evaluates=False, steps=1, **given):
    """Takes steps on two ranks along tp, and returns what it says where that fails."""
    import torch.distributed as dist

    rank, labels_of = dist.get_rank(), labels_of or data_of
    try:
        sharded = shard_model(model, blocks=blocks_of(model), **given)
        if evaluates:
            with torch.no_grad():
                model(input_ids=row_of(0, 0, 1))
            sharded.reshard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            with sharded.micro_batch(is_last=True):
                loss_of(model, row_of(step, data_of(rank), 0), row_of(step, labels_of(rank), 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except RecipeError as error:
        return str(error)
    return ""


class Fused(nn.Module):
    """A gate and what it lets through in one matrix, of which each rank would chunk its own rows."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].both, self.layers[0].down = nn.Linear(16, 64), nn.Linear(32, 16)
        self.layers[0].forward = self.mix

    def mix(self, x):
        gate, up = self.layers[0].both(x).chunk(2, -1)
        return x + self.layers[0].down(nn.functional.silu(gate) * up)

    def forward(self, input_ids):
        return self.head(self.layers[0](self.embedding(input_ids)))


def zeroed():
    """Nothing comes through the block in the first step, so what is in it has no gradient."""
    model = mine()
    for layer in model.layers:
        nn.init.zeros_(layer.down.weight)
    return model


class Wrapped(nn.Module):
    """As peft wraps a model: it has the plan of what is inside, whose names have a prefix here."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    @property
    def tp_plan(self):
        return self.inside.tp_plan

    @property
    def layers(self):
        return self.inside.model.layers

    def forward(self, **named):
        return self.inside(**named)


def take_wrong_steps():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    qwen, two = of_transformers("qwen3"), Parallel(tp_size=2)
    names = {name: word for name, word in qwen().tp_plan.items() if "_norm" not in name}
    of_two = {"stage": two, "tp_plan": PLAN}
    ungated = {name: word for name, word in PLAN.items() if "gate" not in name}
    meshes = {sizes: init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "tp")) for sizes in ((1, 2), (2, 1))}
    return {
        "right": shard_and_step(mine(), **of_two),
        "norms of heads": shard_and_step(qwen(), stage=two, tp_plan=names),
        "gate": shard_and_step(mine(), **of_two | {"tp_plan": ungated}),
        "data": shard_and_step(mine(), data_of=lambda rank: rank, **of_two),
        "data after an evaluation": shard_and_step(mine(), data_of=lambda rank: rank, evaluates=True, **of_two),
        "labels": shard_and_step(of_transformers("llama")(), labels_of=lambda rank: rank, stage=two),
        "no gate in the first step": shard_and_step(zeroed(), steps=2, **of_two | {"tp_plan": ungated}),
        "a whole norm": shard_and_step(mine(), **of_two | {"tp_plan": PLAN | {"layers.*.norm": PARTIAL}}),
        "a parameter": shard_and_step(mine(), **of_two | {"tp_plan": ungated | dict.fromkeys(GATE, PARTIAL)}),
        "wrapped": shard_and_step(Wrapped(of_transformers("llama")()), stage=two),
        "rows alone": shard_and_step(mine(), **of_two | {"tp_plan": plan_of(**{"layers.*.up": ""})}),
        "fused": shard_and_step(Fused(), **of_two | {"tp_plan": FUSED}, example=row_of(0, 0, 0)),
        "fused, gathered": shard_and_step(Fused(), **of_two | {"tp_plan": GATHERED}, example=row_of(0, 0, 0)),
        "one rank along tp": shard_and_step(mine(), tp_plan=PLAN, mesh=meshes[2, 1]),
        "another size": shard_and_step(mine(), stage=Parallel(tp_size=4), tp_plan=PLAN, mesh=meshes[1, 2]),
        "no axis": shard_and_step(mine(), **of_two, mesh=meshes[1, 2]["dp_shard"]),
    }


def test_a_plan_that_leaves_a_part_out_is_told_in_the_first_step():
    differs, cause = "the gradient of {} differs between ranks along tp", "of it; else they had other random numbers"
    wanted = {
        "right": [],
        "one rank along tp": [],
        "norms of heads": [differs.format("model.layers.0.self_attn.q_norm.weight"), cause],
        "gate": [differs.format("layers.0.gate.weight"), "must say 'replicated_with_grad_allreduce' of it"],
        "data": ["ranks along tp were given other inputs", "layout.data_rank(rank).dp_rank"],
        "data after an evaluation": ["ranks along tp were given other inputs"],
        "labels": ["the gradient of what the model returns differs", "labels, masks or scales of the loss were others"],
        "no gate in the first step": [differs.format("layers.0.gate.weight")],
        "a whole norm": ["the gradient of layers.0.norm.weight is the same on all ranks", "it would count 2 times"],
        "a parameter": [],
        "wrapped": ["the model's own plan names none of its modules (lm_head and 8 more)"],
        "rows alone": ["layers.0.down takes 12 features", "was given 24"],
        "fused": ["example: the model computes something else than before", "say colwise_gather_output and rowwise_"],
        "fused, gathered": [],
        "another size": ["parallel.tp_size = 4, and the mesh has 2; leave one out"],
        "no axis": ["parallel.tp_size = 2 needs the mesh axis tp; the mesh has dp_shard"],
    }
    for messages in run_world(2, take_wrong_steps):
        assert messages.keys() == wanted.keys()
        for name, parts in wanted.items():
            assert bool(messages[name]) == bool(parts), messages[name]
            assert all(part in messages[name] for part in parts), messages[name]


class Odd(nn.Module):
    """Calls a linear by name, has a module twice, and a hook on what ranks gather."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 12)
        self.layers = nn.ModuleList([nn.Linear(16, 16)] * 2)
        self.head.register_forward_hook(lambda head, inputs, output: output.softmax(-1))

    def forward(self, x):
        return self.head(self.layers[1](self.layers[0](self.norm(self.first(input=x))).relu()))


ODD = {"first": "colwise_gather_output", "layers.*": "colwise_gather_output", "head": "colwise_gather_output"}


def use_oddly(folder):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    train("norms of heads", folder, 1, all_last=True)
    torch.manual_seed(0)
    model, x = Odd(), torch.ones(3, 8)
    model(x)[:, 0].sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "tp"))
    sharded = shard_model(model, blocks=[], stage="ddp", mesh=mesh, tp_plan=ODD)
    with sharded.micro_batch(is_last=True):
        pass  # a step that is left out
    with sharded.micro_batch(is_last=True):
        model(x)[:, 0].sum().backward()
    errors = [relative_error(whole(p.grad), expected[name]) for name, p in model.named_parameters()]
    words = mine()
    shard_model(words, blocks=words.layers, stage=Parallel(tp_size=2), tp_plan=PLAN)
    with pytest.raises(IndexError):
        words(torch.tensor([[3, WORDS]]))
    return max(errors)


def test_odd_modules_and_loops(tmp_path):
    """A loop that calls every micro-batch the last one too, and a token that no rank has."""
    assert max(run_world(2, use_oddly, tmp_path)) < 1e-6
    assert_parity(torch.load(tmp_path / "norms of heads.0", weights_only=False), expected_of("norms of heads", 1))


class Scaled(nn.Embedding):
    def forward(self, ids):
        return 3 * super().forward(ids)


class Heads(nn.Module):
    head_dim = 16

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 48)


def plan_of(**changes):
    return {name: word for name, word in (PLAN | changes).items() if word}


def with_part(name, part):
    model = mine()
    setattr(model, name, part)
    return model


def tied():
    model = mine()
    model.head.weight = model.embedding.weight
    return model


REFUSED = {
    "no plan": (mine, None, "states no plan of its own; say how each linear is sharded, as in tp_plan={"),
    "an empty plan": (mine, {}, "tp_plan = {}: no words by names"),
    "a word": (
        mine,
        plan_of(head="packed_colwise"),
        "tp_plan['head'] = 'packed_colwise': must be one of colwise, rowwise",
    ),
    "experts": (of_transformers("mixtral"), None, "or pass a tp_plan without it: what a plan leaves out stays whole"),
    "a name": (mine, plan_of(hed="colwise"), "tp_plan['hed']: no module of the model has such a name"),
    "two words": (mine, PLAN | {"layers.0.up": "rowwise"}, "says 'colwise' and 'rowwise' of layers.0.up; say one"),
    "a norm": (
        mine,
        PLAN | {"layers.*.norm": "colwise"},
        "'colwise' of layers.0.norm, a LayerNorm; it is a word for Linear",
    ),
    "a kind of embedding": (
        lambda: with_part("embedding", Scaled(WORDS, 16)),
        PLAN,
        "of embedding, a Scaled; it is a word for Embedding alone",
    ),
    "norms of rows": (
        lambda: with_part("embedding", nn.Embedding(WORDS, 16, max_norm=1.0)),
        PLAN,
        "of embedding, whose max_norm needs all rows on one rank",
    ),
    "uneven": (mine, PLAN | {"head": "colwise"}, f"head, whose weight has {WORDS} rows: tp_size must divide them"),
    "too few": (
        lambda: with_part("head", nn.Linear(16, 1)),
        PLAN,
        "head, whose weight has 1 rows: too few for 2 ranks",
    ),
    "a weight that is computed": (
        lambda: with_part("head", nn.utils.parametrizations.weight_norm(nn.Linear(16, WORDS))),
        PLAN,
        "head, whose weight is computed from other parameters",
    ),
    "attention of torch's own": (
        lambda: with_part("attention", nn.MultiheadAttention(16, 2)),
        PLAN | {"attention.out_proj": "rowwise"},
        "attention.out_proj, whose weight an nn.MultiheadAttention multiplies with itself",
    ),
    "a number for a name": (mine, {0: "colwise"}, "tp_plan[0] = 'colwise': a name and a word must be text"),
    "a list": (mine, [("head", "colwise")], "tp_plan = [('head', 'colwise')]: no words by names"),
    "half a head": (
        lambda: with_part("heads", Heads()),
        PLAN | {"heads.q": "colwise"},
        "a rank's share of 24 rows would split a head of 16",
    ),
    "half of a tie": (
        tied,
        plan_of(head=""),
        "embedding (embedding_rowwise) and head (not in tp_plan) have one weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_plan_is_refused_before_a_process_group(name):
    build, plan, message = REFUSED[name]
    model = build()
    with pytest.raises(RecipeError) as refusal:
        shard_model(model, blocks=blocks_of(model), stage=Parallel(tp_size=2), tp_plan=plan)
    assert message in str(refusal.value) and str(refusal.value).startswith("shard_model: parallel.tp_size = 2: ")


def test_a_plan_of_a_step_refuses_what_the_first_step_would():
    plan = plan_of(**{"layers.*.up": ""})
    model, given = mine(), {"batch": row_of(0, 0, 0), "gpus": 2, "loss": loss_of, "stage": Parallel(tp_size=2)}
    with pytest.raises(RecipeError, match=r"layers\.0\.down takes 12 features by tp_plan and was given 24"):
        plan_module(model, blocks=model.layers, tp_plan=plan, **given)


def test_a_plan_of_a_step_leaves_the_module_as_it_was():
    model = mine()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    plan_module(
        model, blocks=model.layers, batch=row_of(0, 0, 0), gpus=2, loss=loss_of, stage=Parallel(tp_size=2), tp_plan=PLAN
    )
    assert [type(module) for module in model.modules()] == kinds
    assert not any(module._forward_pre_hooks for module in model.modules())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
