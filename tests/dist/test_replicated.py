"""Ranks that hold the whole model: gradients to the bit as by hand, parameters themselves where nothing is cast."""

import copy
import dataclasses
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch import nn
from world import run_world

MICROS, WIDTH = 3, 8


class Net(nn.Module):
    """Blocks between the two ends of a tied weight; one block that only rank 0 runs, and a frozen scale."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, skips):
        hidden = self.embed(ids)
        for number, block in enumerate(self.blocks):
            if not (skips and number == 1):
                hidden = block(hidden)
        return self.head(hidden * self.scale)


def made():
    torch.manual_seed(0)
    return Net()


def batches(rank, step=0):
    dice = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(0, 11, (5,), generator=dice) for _ in range(MICROS)]


def loss_of(model, ids, skips):
    return nn.functional.cross_entropy(model(ids, skips).float(), ids.roll(1), reduction="sum") / 30


def by_hand(params, reduce, rank, world, step=0, model=None):
    """Sums of gradients by plain modules and one all-reduce a parameter, in the same dtypes."""
    import torch.distributed as dist

    model = model or made()
    cast = copy.deepcopy(model).to(params)
    sums = {}
    for ids in batches(rank, step):
        loss_of(cast, ids, skips=rank == 1).backward()
        for name, parameter in cast.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.to(reduce)
                parameter.grad = None
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            summed = sums.get(name, torch.zeros_like(parameter, dtype=reduce))
            if world > 1:
                dist.all_reduce(summed)
            sums[name] = summed.to(parameter.dtype)
    return sums


def compare(params, reduce, bug=None, bucket=0):
    """Names of parameters whose gradients are not those of `by_hand` to the bit, in two steps of AdamW; and what else
    was seen of them. `bucket`: elements that are summed together, at most."""
    import torch.distributed as dist

    from shardbook import Precision, shard_model
    from shardbook.model.dtypes import DTYPES
    from shardbook.parallel import buckets, replicated
    from shardbook.plan.formulas import predict_traffic
    from shardbook.ranks.distributed import start_distributed

    ranks = start_distributed()
    if bug:
        bug(replicated)
    buckets.BUCKET_BYTES = bucket * DTYPES[reduce].itemsize
    model, seen = made(), set()
    at_rest = dict(model.named_parameters())
    sharded = shard_model(model, blocks=model.blocks, stage="ddp", precision=Precision(params=params, reduce=reduce))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    twin = made()
    twin_optimizer = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=0.1)
    real, begun = dist.all_reduce, []

    def all_reduce(tensor, *positional, **named):
        begun.append(tensor.numel())
        return real(tensor, *positional, **named)

    for step in range(2):
        wanted = by_hand(DTYPES[params], DTYPES[reduce], ranks.rank, ranks.world_size, step, twin)
        with torch.no_grad():  # an evaluation before each step: what it gathered must not be what the step sees
            assert model(batches(0)[0], False).dtype == torch.float32
        sharded.reshard()
        dist.all_reduce = all_reduce
        begun.clear()
        for number, ids in enumerate(batches(ranks.rank, step)):
            is_last = number == MICROS - 1
            with sharded.micro_batch(is_last):
                loss = loss_of(model, ids, skips=ranks.rank == 1)
                look = model.blocks[0][0].weight.register_hook(
                    lambda _: seen.add(f"{len(begun)} sent before the first")
                )
                loss.backward()
                look.remove()
            if not is_last:
                seen.discard("0 sent before the first")
                assert not begun and {p.dtype for p in model.parameters()} == {DTYPES[params]}
        dist.all_reduce = real
        assert all(at_rest[name] is parameter for name, parameter in model.named_parameters())
        for name, parameter in model.named_parameters():
            if not (parameter.requires_grad or parameter.grad is None):
                seen.add(f"{name} is frozen and has a gradient")
            if parameter.requires_grad and (
                wanted[name].any() if parameter.grad is None else not torch.equal(parameter.grad, wanted[name])
            ):
                seen.add(name)
        seen.add(f"sent {begun}")
        if begun:  # beside them the loop's two sums, 72 bytes, which this one has not
            said = predict_traffic(sharded.layout, MICROS)["all_reduce", "dp_replicate"]
            assert (said.calls - 2, said.payload_bytes - 72) == (len(begun), sum(begun) * DTYPES[reduce].itemsize)
        for name, parameter in twin.named_parameters():
            parameter.grad = wanted.get(name)
        twin_optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return seen


BLOCK, TIED = WIDTH * WIDTH + WIDTH, 11 * WIDTH


@pytest.mark.parametrize("params, reduce", [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_two_ranks_have_the_sums_made_by_hand(params, reduce):
    """Also of a block that only one of them ran; its sum waits, and those after it, so that the order is one."""
    first, second = run_world(2, compare, params, reduce)
    sent = f"sent {[BLOCK, BLOCK, BLOCK, TIED]}"
    assert first == {sent, "2 sent before the first"}
    assert second == {sent, "1 sent before the first"}


@pytest.mark.parametrize(
    ("bucket", "sent", "before"),
    [
        (2 * BLOCK, [2 * BLOCK, BLOCK, TIED], (1, 0)),
        (3 * BLOCK - 1, [2 * BLOCK, BLOCK + TIED], (1, 0)),
        (3 * BLOCK + TIED, [3 * BLOCK + TIED], (0, 0)),
    ],
)
def test_what_is_small_is_summed_together(bucket, sent, before):
    """Neighbours, up to a size, with the bits that they have alone; the one rank's missing block holds back its own."""
    found = run_world(2, compare, "bf16", "fp32", None, bucket)
    assert found == [{f"sent {sent}", f"{count} sent before the first"} for count in before]


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_one_rank_has_its_own(params):
    assert run_world(1, compare, params, "fp32") == [{"sent []", "0 sent before the first"}]


def earlier_micros_are_lost(replicated):
    def add(part, number, gradient, dtype, real=replicated.GradientBucket.add):
        part.in_flat.discard(number)
        real(part, number, gradient, dtype)

    replicated.GradientBucket.add = add


def evaluation_stays(replicated):
    replicated.ReplicatedParameters.free = lambda self: None


def test_planted_bugs_turn_it_red():
    found = run_world(2, compare, "fp32", "fp32", earlier_micros_are_lost)
    assert "embed.weight" in found[0]
    with pytest.raises(AssertionError):
        run_world(2, compare, "bf16", "fp32", evaluation_stays)


def sums_of(stage, reduces):
    """Gradients after a backward for each of `reduces`: whether ranks sum in it."""
    from shardbook import shard_model
    from shardbook.ranks.distributed import start_distributed

    ranks, model = start_distributed(), made()
    sharded = shard_model(model, blocks=model.blocks, stage=stage)
    for ids, is_last in zip(batches(ranks.rank), reduces, strict=False):
        with sharded.micro_batch(is_last):
            loss_of(model, ids, skips=False).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: getattr(each, "full_tensor", lambda each=each: each)().tolist() for name, each in found.items()}


def sums_are_sent_again(stage, reduces):
    """Planted bug: as if what a parameter has were of this rank alone."""
    from shardbook.parallel.replicated import ReplicatedParameters

    ReplicatedParameters._set_aside = lambda *given: None
    return sums_of(stage, reduces)


@pytest.mark.parametrize("reduces", [(True, True), (True, False, True)])
def test_what_is_summed_is_not_sent_again(reduces):
    """In a loop that reduces several times before it steps: fully_shard's sums, to rounding."""
    ddp, planted, zero3 = (
        run_world(2, run, stage, reduces)[0]
        for run, stage in ((sums_of, "ddp"), (sums_are_sent_again, "ddp"), (sums_of, "zero3"))
    )
    assert ddp.keys() == zero3.keys()
    for name, wanted in zero3.items():
        torch.testing.assert_close(torch.tensor(ddp[name]), torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    assert (torch.tensor(planted["embed.weight"]) - torch.tensor(ddp["embed.weight"])).abs().max() > 1e-3


def backward_again(params):
    """Parameters, by what was done, whose gradients are not the sums of those of one forward and one backward."""
    from torch.utils.checkpoint import checkpoint

    from shardbook import Precision, shard_model
    from shardbook.ranks.distributed import start_distributed

    rank = start_distributed().rank
    first, second = batches(rank)[:2]

    def fresh():
        model = made()
        return model, shard_model(model, blocks=model.blocks, stage="ddp", precision=Precision(params=params))

    def gradients(model):
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}

    def after(*losses):
        model, _ = fresh()
        sum(loss_of(model, ids, False) for ids in losses).backward()
        return gradients(model)

    def evaluate(model, sharded):
        with torch.no_grad():
            model(batches(0)[0], False)
        sharded.reshard()

    def graph_kept(model, sharded):
        loss = loss_of(model, first, False)
        loss.backward(retain_graph=True)
        loss.backward()

    def an_evaluation_between(model, sharded):
        loss = loss_of(model, first, False)
        evaluate(model, sharded)
        loss.backward()

    def blocks_run_again(model, sharded):
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        an_evaluation_between(model, sharded)

    def two_forwards(model, sharded):
        one, other = (loss_of(model, ids, False) for ids in (first, second))
        one.backward()
        other.backward()

    def the_model_runs_again(model, sharded):
        runs = partial(checkpoint, model, use_reentrant=False)
        sum(loss_of(runs, ids, False) for ids in (first, second)).backward()

    one, other, both = after(first), after(second), after(first, second)
    found = {}
    for done, wanted in (
        (graph_kept, {name: one[name] + one[name] for name in one}),
        (an_evaluation_between, one),
        (blocks_run_again, one),
        (two_forwards, {name: one[name] + other[name] for name in one}),
        (the_model_runs_again, both),
    ):
        model, sharded = fresh()
        done(model, sharded)
        got = gradients(model)
        found[done.__name__] = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    return found


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_a_backward_finds_what_its_forward_had(params):
    """Copies that were freed since are made again."""
    for found in run_world(2, backward_again, params):
        assert len(found) == 5 and not any(found.values()), found


def backward_after_a_step(params, fused):
    """What is said of a backward whose forward ran with other weights: of copies that are gone, or made of new ones."""
    from shardbook import Precision, shard_model
    from shardbook.ranks.distributed import start_distributed

    rank, said = start_distributed().rank, []
    for others in (False, True):
        model = made()
        shard_model(model, blocks=model.blocks, stage="ddp", precision=Precision(params=params))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        early = loss_of(model, batches(rank)[0], False)
        loss_of(model, batches(rank)[1], False).backward()
        optimizer.step()
        if others:
            loss_of(model, batches(rank)[2], False)
        try:
            early.backward()
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("params", "fused", "words"),
    [
        ("bf16", False, "parameters were changed, by an optimizer's step"),
        ("bf16", True, "parameters were changed, by an optimizer's step"),
        ("fp32", False, "modified by an inplace"),
    ],
)
def test_a_backward_of_other_weights_is_refused(params, fused, words):
    """As autograd does where it has saved the weights themselves, if the optimizer tells it."""
    for said in run_world(2, backward_after_a_step, params, fused):
        assert len(said) == 2 and all(words in each for each in said), said


def compile_all():
    """Parameters whose gradients are others where the model is compiled as a whole."""
    from shardbook import Precision, shard_model
    from shardbook.ranks.distributed import start_distributed

    rank, found = start_distributed().rank, []
    for compiles in (False, True):
        model = made()
        shard_model(model, blocks=model.blocks, stage="ddp", precision=Precision(params="bf16"))
        runs = torch.compile(model, backend="aot_eager") if compiles else model
        for ids in batches(rank)[:2]:
            loss_of(runs, ids, False).backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return [name for name, gradient in found[0].items() if not torch.equal(gradient, found[1][name])]


def test_a_model_compiled_as_a_whole_has_the_same_bits():
    """What frees and copies weights is no part of a graph: traced, it ended in a segmentation fault."""
    assert run_world(2, compile_all) == [[], []]


class Keeping(nn.Linear):
    """What notes its weight as it is set, and computes with that."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["noted"] = value

    def forward(self, x):
        return nn.functional.linear(x, self.noted, self.bias)


class Noting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Keeping(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.inner(x))


def train_noting():
    """Gradients under ddp and by hand; how many operations copied the weights."""
    from shardbook import Precision, shard_model
    from shardbook.ranks.distributed import start_distributed

    start_distributed()
    torch.manual_seed(0)
    model, x = Noting(), torch.randn(3, WIDTH)
    twin = copy.deepcopy(model).bfloat16()
    twin.inner.weight = twin.inner.weight
    twin(x.bfloat16()).float().sum().backward()
    shard_model(model, blocks=[model.inner], stage="ddp", precision=Precision(params="bf16"))
    real, calls = torch._foreach_copy_, []
    torch._foreach_copy_ = lambda into, source: calls.append(len(into)) or real(into, source)
    model(x).sum().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return calls, [torch.equal(ours.grad, theirs.grad.float()) for ours, theirs in pairs]


def test_weights_are_cast_in_one_call_wherever_a_module_keeps_them():
    assert run_world(1, train_noting) == [([4], [True] * 4)]


def train_alone(stage):
    """What a rank alone sends and keeps under a stage that would shard."""
    import torch.distributed as dist

    from shardbook import shard_model
    from shardbook.comm.ledger import Ledger
    from shardbook.plan.formulas import predict_gathered_peak, predict_traffic
    from shardbook.ranks.distributed import start_distributed

    start_distributed()
    model = made()
    kept = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    sharded = shard_model(model, blocks=model.blocks, stage=stage)
    with Ledger(sharded.layout.groups(0)) as ledger:
        ledger.open()
        with sharded.micro_batch(is_last=True):
            loss_of(model, batches(0)[0], False).backward()
            assert kept == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert dist.get_world_size() == 1 and predict_gathered_peak(sharded.layout) == 0
    predicted = predict_traffic(sharded.layout, micros=1)
    return ledger.traffic, {op for op, _ in predicted}


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero3"])
def test_a_rank_alone_copies_and_sends_nothing(stage):
    assert run_world(1, train_alone, stage) == [({}, {"all_reduce"})]  # predicted: the loop's counts, which it has not


def test_a_model_is_put_under_a_stage_once():
    from shardbook.parallel.library import check_parameters
    from shardbook.parallel.replicated import COPIED
    from shardbook.recipe import RecipeError

    model = made()
    COPIED.add(model)
    with pytest.raises(RecipeError, match="the model is sharded already"):
        check_parameters(model)


def test_floats_are_cast_wherever_they_lie():
    from shardbook.parallel.replicated import cast_floats

    @dataclasses.dataclass
    class Other:
        x: torch.Tensor

    pair = nn.utils.rnn.PackedSequence(torch.ones(2), torch.tensor([1, 1]))
    given = (torch.ones(1), [torch.ones(1, dtype=torch.int64), {"a": torch.ones(1)}], pair, Other(torch.ones(1)), None)
    named = cast_floats(defaultdict(list, a=torch.ones(1)), torch.bfloat16)
    assert named["a"].dtype == torch.bfloat16 and named["b"] == []
    cast = cast_floats(given, torch.bfloat16)
    assert cast[0].dtype == cast[1][1]["a"].dtype == cast[2].data.dtype == cast[3].x.dtype == torch.bfloat16
    assert cast[1][0].dtype == torch.int64 and given[3].x.dtype == torch.float32 and cast[4] is None
