"""`shard_model` in a loop of one's own: the page's example as it stands there, a transformers model, every stage,
against one plain process; exact bytes; and what is refused."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from cases import assert_parity, relative_error, whole
from reference import EPS, descend
from tiny import config
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM
from world import run_world

from shardbook import Parallel, Precision, RecipeError, shard_model

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
STEPS, MICROS, LENGTH, RATE, DECAY, MAX_NORM = 3, 2, 9, 3e-3, 0.1, 0.5
EXACT = {
    2: {
        "ddp": "ddp",
        "zero1": "zero1",
        "zero2": "zero2",
        "zero3": "zero3",
        "hpZ": Parallel(stage="zeropp", secondary_shard=2),
        "ahead": Parallel(stage="zero3", forward_prefetch=1, backward_prefetch=2),
    },
    4: {"hsdp": Parallel(stage="hsdp", dp_shard_size=2), "hpZ": Parallel(stage="zeropp", secondary_shard="node")},
}
NEAR = {
    2: {
        "qwZ": Parallel(stage="zeropp", quantize_weights=8),
        "qgZ": Parallel(stage="zeropp", quantize_gradients=[8, 8]),
    },
    4: {"all": Parallel(stage="zeropp", quantize_weights=8, quantize_gradients=[8, 8], secondary_shard="node")},
}
RUNS = [(ranks, name) for ranks in (2, 4) for name in EXACT[ranks] | NEAR[ranks]]


def example(number: int) -> str:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[number]


def run_example():
    names = {}
    exec(compile(example(0), str(PAGE), "exec"), names)
    exec(compile(example(1), str(PAGE), "exec"), names)
    exec(compile(example(2), str(PAGE), "exec"), names)
    return {name: whole(p).tolist() for name, p in names["model"].named_parameters()}


def test_the_example_of_the_page_computes_what_one_process_does():
    """The reference: the same module, all rows of a step at once, plain AdamW."""
    first, second = run_world(2, run_example)
    assert first == second
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))
    model = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for rows in torch.randn(5, 2, 3, 4, 9, generator=torch.Generator().manual_seed(1)).flatten(1, 3):
        optimizer.zero_grad()
        (model(rows[:, :8]) - rows[:, 8:]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    # AdamW's first steps are the sign of a gradient, so the rounding of one near 0 can move a weight by a part of 1e-2
    for name, parameter in model.named_parameters():
        assert relative_error(torch.tensor(first[name]), parameter.detach()) < 1e-4, name


def llama() -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(attn_implementation="eager"), dtype=torch.float32)


def loss_of(model: nn.Module, step: int, rank: int, micro: int):
    """Summed loss of one row's LENGTH - 1 predictions."""
    ids = torch.randint(0, 259, (1, LENGTH), generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro))
    logits = model(input_ids=ids).logits[0, :-1].float()
    return nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")


def train_all(ranks: int, folder: Path):
    """Every stage with a transformers model, each with what was sent beside the formula's."""
    import reference
    import torch.distributed as dist

    from shardbook.axes import WORLD
    from shardbook.comm.ledger import Ledger, Volume
    from shardbook.plan.events import COUNTS_BYTES, FLAGS_BYTES, NORM_BYTES
    from shardbook.plan.formulas import predict_resident, predict_traffic
    from shardbook.run.log.memory import memory_metrics

    dist.init_process_group("gloo")
    rank, bytes_of = dist.get_rank(), {}
    for name, stage in (EXACT[ranks] | NEAR[ranks]).items():
        model = llama()
        sharded = shard_model(model, blocks=model.model.layers, stage=stage)
        decays = [[p for p in model.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)]
        groups = [{"params": ps, "weight_decay": decay} for ps, decay in zip(decays, (DECAY, 0.0), strict=True)]
        optimizer, result = torch.optim.AdamW(groups, lr=RATE, eps=EPS), reference.Result([], [], [], {})
        for step in range(STEPS):
            total = torch.zeros(())
            with Ledger(sharded.layout.groups(rank)) as ledger:
                ledger.open()
                for micro in range(MICROS):
                    with sharded.micro_batch(is_last=micro == MICROS - 1):
                        loss = loss_of(model, step, rank, micro) / (ranks * MICROS * (LENGTH - 1))
                        loss.backward()
                    total += loss.detach()
            dist.all_reduce(total)
            result.gradients.append({name: whole(p.grad) for name, p in model.named_parameters()})
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            memory = memory_metrics(sharded, optimizer)
            optimizer.zero_grad()
            result.losses.append(total.item())
            result.norms.append(getattr(norm, "full_tensor", norm.clone)().item())
        result.weights = {name: whole(p) for name, p in model.named_parameters()}
        torch.save(result, folder / f"{name}.{rank}")
        said, layout = predict_traffic(sharded.layout, MICROS), sharded.layout
        # a recipe's loop sums counts, flags and the norm too, which is no part of what is watched here
        everyone = next((axis for axis, size in layout.sizes.items() if size == ranks), WORLD)
        loops = (everyone, COUNTS_BYTES), (everyone, FLAGS_BYTES), ("dp_shard", NORM_BYTES * (layout.shards > 1))
        for axis, more in loops:
            left = said.pop(("all_reduce", axis), Volume()) + Volume(-bool(more), -more)
            said |= {("all_reduce", axis): left} if left.calls > 0 else {}
        kept = predict_resident(layout, rank)
        bytes_of[name] = (
            (
                ledger.traffic,
                memory["memory/params_bytes"],
                memory["memory/grads_bytes"],
                memory["memory/optimizer_bytes"],
            ),
            (said, kept.params_bytes, kept.grads_bytes, kept.optimizer_bytes),
        )
    return bytes_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """On two ranks, and on four as two nodes of two."""
    found = {}
    for ranks in (2, 4):
        folder = tmp_path_factory.mktemp("library")
        found[ranks] = folder, run_world(ranks, train_all, ranks, folder, environment={"LOCAL_WORLD_SIZE": "2"})
    return found


@cache
def expected_of(ranks):
    def loss(step):
        parts = [loss_of(model, step, rank, micro) for rank in range(ranks) for micro in range(MICROS)]
        return sum(parts) / (ranks * MICROS * (LENGTH - 1))

    model = llama()
    return descend(model, loss, STEPS, RATE, DECAY, MAX_NORM)


@pytest.mark.parametrize("ranks, name", RUNS)
def test_a_transformers_model_under_every_stage(ranks, name, trained):
    (folder, found), expected = trained[ranks], expected_of(ranks)
    for rank in range(ranks):
        measured, predicted = found[rank][name]
        assert measured == predicted
        got = torch.load(folder / f"{name}.{rank}", weights_only=False)
        if name in EXACT[ranks]:
            assert_parity(got, expected)
        else:  # weights and gradients to 1/127 of their block's largest
            assert got.losses == pytest.approx(expected.losses, rel=0.01) and got.losses != expected.losses
            assert got.norms == pytest.approx(expected.norms, rel=0.05)


class Chain(nn.Module):
    """Blocks of which a forward leaves some out."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x, without=()):
        hidden = self.first(x)
        for number, block in enumerate(self.blocks):
            hidden = hidden if number in without else block(hidden)
        return self.last(hidden)


def chain(stage):
    torch.manual_seed(0)
    model = Chain()
    return model, shard_model(model, blocks=model.blocks, stage=stage)


EVERY = {
    "ddp": "ddp",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "hsdp": Parallel(stage="hsdp", dp_shard_size=2),
    "hpZ": Parallel(stage="zeropp", secondary_shard=2),
}
BROKEN = {
    "a backward": lambda block: block.register_forward_hook(
        lambda b, i, made: made.register_hook(lambda _: 1 / 0) and None
    ),
    "a forward": lambda block: block.register_forward_hook(lambda *_: 1 / 0),
}


def go_on_after_an_error(stages):
    """What each stage says at an error and at the forward after it, by where that was and whether the loop uses
    `micro_batch`."""
    import contextlib

    import torch.distributed as dist

    dist.init_process_group("gloo")
    said, x = {}, torch.ones(2, 4)
    for name in stages:
        for what, around in (("a backward", True), ("a backward", False), ("a forward", True)):
            model, sharded = chain(EVERY[name])
            with sharded.micro_batch(is_last=False) if around else contextlib.nullcontext():
                model(x).sum().backward()
            hook = BROKEN[what](model.blocks[1])
            for number in range(2):
                try:
                    with sharded.micro_batch(is_last=True) if around else contextlib.nullcontext():
                        model(x).sum().backward()
                    heard = ""
                except (ZeroDivisionError, RuntimeError) as error:
                    heard = str(error)
                said[name, what, around, number] = heard
                hook.remove()
    return said


@pytest.mark.parametrize(("ranks", "stages"), [(2, ("ddp", "zero1", "zero2", "zero3")), (4, ("hsdp", "hpZ"))])
def test_no_stage_goes_on_after_an_error(ranks, stages):
    """Whether ranks caught it or not. A forward that broke gathered nothing under ddp, and is forgotten."""
    for said in run_world(ranks, go_on_after_an_error, stages):
        for (name, what, _, number), heard in said.items():
            if not number:
                assert heard == "division by zero"
            elif (name, what) == ("ddp", "a forward"):
                assert heard == ""
            else:
                assert heard == f"{what} of this model ended in an error, and its gradients are lost: build it anew", (
                    name
                )


# which block each of two micro-batches leaves out, step by step
LEFT_OUT = ((1, 1), (None, 1), (None, None), (1, 1), (2, 1))


def leave_out(stages):
    """Gradients of every step and weights after it, on these stages."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = {}
    for name in stages:
        model, sharded = chain(EVERY[name])
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
        for step, micros in enumerate(LEFT_OUT):
            for number, without in enumerate(micros):
                with sharded.micro_batch(is_last=number == len(micros) - 1):
                    dice = torch.Generator().manual_seed(100 * step + 10 * number + dist.get_rank())
                    model(torch.randn(2, 4, generator=dice), (without,)).square().sum().backward()
            for parameter, each in model.named_parameters():
                found[name, step, parameter, "gradient"] = None if each.grad is None else whole(each.grad).tolist()
            optimizer.step()
            optimizer.zero_grad()
            found |= {(name, step, n, "weight"): whole(p).tolist() for n, p in model.named_parameters()}
    return found


# before torch 2.13 a unit's part of a sum across replicas is lost where its last micro-batch does not reach it
KEEPS_PARTS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [(2, ("ddp", "zero1", "zero2", "zero3")), (4, ("ddp", *["hsdp"] * KEEPS_PARTS, "hpZ"))],
)
def test_a_block_that_no_rank_reached_has_zeros_in_every_stage(ranks, stages):
    """Whatever ran before, and to the bit where stages add in one order; so its weights decay alike."""
    found = run_world(ranks, leave_out, stages)[0]
    for (name, step, parameter, what), got in found.items():
        assert got is not None, (name, step, parameter)
        unreached = LEFT_OUT[step] == (1, 1) and parameter.startswith("blocks.1")
        if unreached and what == "gradient":
            assert not torch.tensor(got).any(), (name, step, parameter)
        like = {"zero1": "ddp", "zero3": "zero2"}.get(name, "ddp" if unreached and not step else name)
        assert got == found[like, step, parameter, what], (name, step, parameter)
        torch.testing.assert_close(got, found["ddp", step, parameter, what], rtol=1e-5, atol=1e-6)
    torch.manual_seed(0)
    decayed = Chain().blocks[1][0].weight.detach() * (1 - RATE * DECAY)
    assert found["ddp", 0, "blocks.1.0.weight", "weight"] == decayed.tolist()


class Shared(nn.Module):
    """Two blocks, and a matrix outside them that a third module has too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


REFUSED = {
    "no module": (lambda m: {"blocks": "a"}, r"blocks\[0\], a str, is no module"),
    "a list of modules": (lambda m: {"blocks": [[m.a, m.b]]}, r"blocks\[0\], a list, is no module"),
    "a container": (
        lambda m: {"blocks": [nn.ModuleList([m.a])]},
        r"blocks\[0\], a ModuleList, is not inside the model",
    ),
    "a container inside": (
        lambda m: setattr(m, "all", nn.ModuleList([m.a])) or {"blocks": [m.all]},
        r"blocks\[0\], a ModuleList, is never run itself; name the modules in it",
    ),
    "one module": (lambda m: {"blocks": m.b}, "blocks = Linear.*: must be several modules"),
    "a number": (lambda m: {"blocks": [], "stage": 3}, "stage = 3: must be a name or a Parallel"),
    "a dtype": (lambda m: {"blocks": [], "precision": "bf16"}, "precision = 'bf16': must be a Precision"),
    "a size": (lambda m: {"blocks": [], "mesh": 2}, "mesh = 2: must be a DeviceMesh"),
    "empty": (lambda m: setattr(m, "e", nn.Parameter(torch.zeros(0, 3))) or {"blocks": []}, "e has no elements"),
    "not inside": (lambda m: {"blocks": [m.a, nn.Linear(4, 4)]}, r"blocks\[1\], a Linear, is not inside the model"),
    "the model": (lambda m: {"blocks": [m]}, r"blocks\[0\], a Shared, is the model itself"),
    "named twice": (lambda m: {"blocks": [m.a, m.b, m.a]}, r"a is blocks\[0\] and blocks\[2\]; name it once"),
    "inside another": (lambda m: {"blocks": [m.a, m.a[0]]}, "block a.0 is inside block a; name one of the two"),
    "a module inside and outside": (
        lambda m: setattr(m, "again", m.a[0]) or {"blocks": [m.a]},
        r"a.0.weight \(in block a\) and again.weight \(in no block\) are one parameter",
    ),
    "a scalar": (lambda m: setattr(m, "scale", nn.Parameter(torch.ones(()))) or {"blocks": []}, "scale is a scalar"),
    "not contiguous": (
        lambda m: setattr(m, "odd", nn.Parameter(torch.ones(4, 2).T)) or {"blocks": []},
        "odd is not contiguous",
    ),
    "a parameter inside and outside": (
        lambda m: {"blocks": [m.a, m.head]},
        r"embed.weight \(in no block\) and head.weight \(in block head\) are one parameter",
    ),
    "a parameter in two blocks": (
        lambda m: {"blocks": [m.embed, m.head]},
        r"embed.weight \(in block embed\) and head.weight \(in block head\) are one parameter",
    ),
    "needs switches": (lambda m: {"blocks": [m.a], "stage": "zeropp"}, "none of its switches is zero3"),
    **{
        f"{key} of two": (
            lambda m, key=key: {"blocks": [m.a, m.b], "stage": Parallel(**{key: 2})},
            f"parallel.{key} = 2: {lacks}",
        )
        for key, lacks in (
            ("tp_size", "the model states no plan of its own; say how each linear is sharded"),
            ("cp_size", "ranks that share rows exchange heads inside attention, and which code .* leave it out"),
            ("pp_size", "a pipeline runs the micro-batches of a step in an order of its own.* leave it out"),
        )
    },
    "unknown stage": (lambda m: {"blocks": [m.a], "stage": "zero4"}, "parallel.stage = 'zero4': must be one of ddp"),
    "no process group": (
        lambda m: {"blocks": [m.a, m.b]},
        "no process group; call torch.distributed.init_process_group",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_a_process_group(name):
    given, said = REFUSED[name]
    model = Shared()
    with pytest.raises(RecipeError, match=said):
        shard_model(model, **given(model))
    assert isinstance(RecipeError("x"), ValueError)  # what a library's user would catch


def refuse():
    """What each wrong call says, on one of two ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    plain, named = init_device_mesh("cpu", (2,)), lambda *names: init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
    replicas = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
    shards = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    half, unlike, rank = Shared().half(), Shared(), dist.get_rank()
    unlike.b.weight.data[0, 0] += rank
    mixed, meta = Shared(), Shared()
    mixed.b.bfloat16()
    if rank:
        meta.to("meta")
    nodes = Parallel(stage="zeropp", quantize_gradients=[8, 4])
    calls = {
        "meta": lambda: shard_model(meta, blocks=[]),
        "nodes": lambda: shard_model(Shared(), blocks=[], stage=nodes),
        "names": lambda: shard_model(Shared(), blocks=[], mesh=plain),
        "axis": lambda: shard_model(Shared(), blocks=[], mesh=replicas),
        "stage": lambda: shard_model(Shared(), blocks=[], stage="ddp", mesh=shards),
        "unknown": lambda: shard_model(Shared(), blocks=[], mesh=named("dp_shard", "ep")),
        "size": lambda: shard_model(Shared(), blocks=[], mesh=named("dp_replicate", "dp_shard")),
        "order": lambda: shard_model(
            Shared(), blocks=[], stage=Parallel(stage="hsdp"), mesh=named("dp_shard", "dp_replicate")
        ),
        "both sizes": lambda: shard_model(Shared(), blocks=[], stage=Parallel(dp_shard_size=4), mesh=shards),
        "dtype": lambda: shard_model(half, blocks=[]),
        "dtypes": lambda: shard_model(mixed, blocks=[]),
        "master": lambda: shard_model(Shared(), blocks=[], precision=Precision(master="bf16")),
        "weights": lambda: shard_model(unlike, blocks=[]),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except RecipeError as error:
            said[name] = str(error)
    twice = Shared()
    shard_model(twice, blocks=[twice.a], mesh=shards)
    for name, model in (("twice", twice), ("a part", nn.Sequential(twice))):
        try:
            shard_model(model, blocks=[])
        except RecipeError as error:
            said[name] = str(error)
    given = shard_model(Shared(), blocks=[], stage="ddp", mesh=replicas)  # one axis is enough where it has all ranks
    assert given.layout.sizes == {"dp_replicate": 2, "dp_shard": 1}
    activation = nn.GELU()  # a module without parameters may be in several blocks
    same = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), activation) for _ in range(2)))
    assert len(shard_model(same, blocks=same).layout.units) == 3
    return said


def test_refused_with_a_process_group():
    wanted = {
        "names": "stage zero3 needs the mesh axis dp_shard; the mesh has axes without names",
        "axis": "stage zero3 needs the mesh axis dp_shard; the mesh has dp_replicate",
        "stage": "stage ddp needs the mesh axis dp_replicate; the mesh has dp_shard",
        "unknown": "the mesh has dp_shard and ep; ep it does not know",
        "size": "parallel.dp_replicate_size = 2: stage zero3 has no such axis",
        "order": "the mesh must have dp_replicate and dp_shard, in this order",
        "both sizes": "parallel.dp_shard_size = 4, and the mesh has 2",
        "dtype": "parameters must be all fp32 or all bf16; there are a.0.weight of torch.float16",
        "dtypes": "a.0.weight of torch.float32, b.weight of torch.bfloat16",
        "master": "precision.master = 'bf16', and the parameters are fp32",
        "weights": "1 of 5 parameters are not the same on every rank, b.weight first",
        "meta": "the model is not the same on every rank",
        "nodes": "LOCAL_WORLD_SIZE is not set",
        "twice": "the model is sharded already",
        "a part": "0 is sharded already",
    }
    for said in run_world(2, refuse):
        assert said.keys() == wanted.keys()
        for name, part in wanted.items():
            assert part in said[name], said[name]


def train_halves():
    """Two worlds of two ranks side by side, as pipeline stages would be: each a mesh of a part of the ranks. And a
    model that lay on the meta device."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))["dp_shard"]
    backwards, refused = DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("dp_shard",)), ""
    try:
        shard_model(llama(), blocks=[], mesh=backwards, stage=Parallel(stage="zeropp", secondary_shard=2))
    except RecipeError as error:
        refused = str(error)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    sharded = shard_model(model, blocks=[model[0]], mesh=mesh, stage="zero3")
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(0.1)
    with sharded.micro_batch(is_last=True):
        model(torch.full((3, 4), 1.0 + dist.get_rank())).sum().backward()
    return refused, {name: whole(p.grad).tolist() for name, p in model.named_parameters()}


def test_a_mesh_of_some_of_the_ranks_and_a_meta_model():
    found = run_world(4, train_halves)
    for refused, _ in found:
        assert "groups inside a node need a mesh of all ranks, in order" in refused
    for first in (0, 2):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
        for rank in (first, first + 1):
            model(torch.full((3, 4), 1.0 + rank)).sum().backward()
        for rank in (first, first + 1):
            for name, parameter in model.named_parameters():
                assert relative_error(torch.tensor(found[rank][1][name]), parameter.grad) < 1e-6, name
