"""Planted bugs: errors that others shipped, each of which leaves a plausible loss curve. A bug is a function that
patches the package in the process of one rank, in which nothing else runs afterwards."""

import contextlib
import dataclasses
import functools
import inspect

from cases import MAX_NORM, Case, run_cases
from planted import replace

BUGS = {}  # name -> (function, the case it is planted in, what torch itself says of it, if it does)


def planted_in(*case, refused="", **options):
    def note(function):
        BUGS[function.__name__] = (function, Case(*case, **options), refused)
        return function

    return note


@planted_in("zero1", 1, 2)
def token_count_not_reduced():
    from shardbook.run import prefetch

    prefetch.begin_sum = lambda *values: lambda: [float(value) for value in values]


@planted_in("zero2", 1, 2, micros=3)
def mean_of_means():
    from shardbook.run import prefetch, prepare

    real_sum, sft = prefetch.begin_sum, prepare.build_objective("sft", None)
    prefetch.begin_sum = lambda *values: lambda: [6.0, *real_sum(*values)()[1:]]
    bug = dataclasses.replace(
        sft, terms=lambda model, micro, totals: sft.terms(model, micro, totals) / max(1, len(micro.targets))
    )
    prepare.build_objective = lambda *given: bug


@planted_in("zero2", 1, 2)
def count_of_the_step_before():
    from shardbook.run import prefetch

    real, begun = prefetch.begin_sum, []

    def begin_sum(*values):
        begun.append(values)
        return real(*begun[-2:][0])

    prefetch.begin_sum = begin_sum


@planted_in("zero3", 1, 2, extra=("train.loss_chunk_tokens=16",))
def head_loses_a_chunk():
    from shardbook.model import loss_head

    real = loss_head.add_product
    loss_head.add_product = lambda total, left, right, is_first: real(total, left, right, is_first=True)


@planted_in("zero3", 1, 2)
def average_in_place_of_sum():
    after_applying(lambda units: [unit.handle.set_gradient_divide_factor(2.0) for unit in units])


@planted_in("hsdp", 2, 2)
def divide_factor_of_the_wrong_group():
    """Divided by the ranks of the shard group, as if each of them had not counted its tokens in the loss."""
    after_applying(lambda units: [unit.handle.set_gradient_divide_factor(4 / 2) for unit in units])


@planted_in("hsdp", 2, 2)
def hsdp_all_reduce_skipped():
    import torch.distributed as dist

    from shardbook.parallel.sharding import apply_stage

    real = dist.all_reduce

    def apply_and_skip(model, layout, mesh):
        sharded = apply_stage(model, layout, mesh)
        replicas = mesh.get_group("dp_replicate")

        def all_reduce(tensor, *positional, group=None, **named):
            return None if group is replicas else real(tensor, *positional, group=group, **named)

        dist.all_reduce = all_reduce
        return sharded

    replace(apply_stage, apply_and_skip)


@planted_in("hsdp", 2, 2, micros=3)
def all_reduce_forgets_the_earlier_micros():
    """Across replicas every micro-batch is reduced, and its partial sum added to what was summed already."""
    in_each_micro_batch(lambda units: units[-1].handle.set_requires_all_reduce(True))


@planted_in("zero1", 1, 2, micros=3)
def sync_on_every_micro_in_zero1():
    in_each_micro_batch(lambda units: units[-1].handle.set_requires_gradient_sync(True))


@planted_in("zero1", 1, 2)
def no_sync_on_the_last_micro():
    from shardbook.parallel.sharding import ShardedModel

    real = ShardedModel.micro_batch
    ShardedModel.micro_batch = lambda sharded, is_last: real(sharded, is_last=False)


@planted_in("zero3", 1, 2, clips=True)
def local_gradient_norm():
    import torch

    from shardbook.optim.clip import clip_gradients

    def local(parameters, limit):
        parameters = [p for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad.to_local() for p in parameters])
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    replace(clip_gradients, local)


@planted_in("zero2", 1, 2, clips=True)
def clip_before_reduce():
    """Each rank clips what it is about to send, and nobody clips the sum."""
    import torch.distributed as dist

    from shardbook.optim.clip import clip_gradients

    replace(clip_gradients, lambda parameters, limit: clip_gradients(parameters, 0))
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    real = getattr(dist, name)
    signature = inspect.signature(real)

    @functools.wraps(real)
    def reduce_scatter(*positional, **named):
        sent = signature.bind(*positional, **named).arguments["input"]
        sent.mul_(min(1.0, MAX_NORM / sent.norm().item()))
        return real(*positional, **named)

    setattr(dist, name, reduce_scatter)


@planted_in("zero2", 1, 2)
def stale_gathered_weights():
    in_each_micro_batch(lambda units: units[-1].handle.set_reshard_after_backward(False))


@planted_in("zero2", 1, 2)
def evaluation_leaves_weights_gathered():
    from shardbook.parallel.sharding import ShardedModel

    ShardedModel.reshard = lambda sharded: None


@planted_in("zero3", 1, 3, refused="already managed by another FSDP group")
def tied_weights_in_two_groups():
    from shardbook.model.causal_lm import CausalLM

    CausalLM.parts = property(lambda model: [[model.embedding], *[[b] for b in model.blocks], [model.norm, model.head]])


@planted_in("zero3", 1, 2)
def gradients_reduced_in_bf16():
    from shardbook.parallel.sharding import apply_stage

    def apply_lower(model, layout, mesh):  # what predicts is not told of it
        lower = layout.precision.model_copy(update={"reduce": "bf16"})
        return apply_stage(model, dataclasses.replace(layout, precision=lower), mesh)

    replace(apply_stage, apply_lower)


@planted_in("zero3", 1, 2)
def block_left_unwrapped():
    with_other_units(lambda units: (units[0], *units[2:]))


@planted_in("zero3", 1, 2)
def zero3_that_is_zero2():
    kept = functools.partial(dataclasses.replace, reshard_after_backward=False, reshard_after_forward=False)
    with_other_units(lambda units: tuple(map(kept, units)))


@planted_in("hsdp", 2, 1)
def replicas_drift():
    """One replica steps a little further than the other; the first one's weights and every loss look right."""
    import torch
    import torch.distributed as dist

    from shardbook.optim import build_optimizer as real

    def build_optimizer(model, *given):
        optimizer = real(model, *given)
        step = optimizer.step

        def drifting():
            step()
            with torch.no_grad():
                next(model.parameters()).mul_(1 + 2e-7 * dist.get_rank())

        optimizer.step = drifting
        return optimizer

    replace(real, build_optimizer)


@planted_in("ddp", 2, 1)
def gradients_never_zeroed():
    from shardbook.optim import build_optimizer as real

    def build_optimizer(model, *given):
        optimizer = real(model, *given)
        optimizer.zero_grad = lambda: None
        return optimizer

    replace(real, build_optimizer)


@planted_in("zero1", 1, 3, tied=False)
def padding_not_counted():
    from shardbook.parallel.units import Unit

    Unit.padded_numel = lambda unit, shards, trained_only=False: unit.numel // shards * shards


@planted_in("zero2", 1, 2)
def ledger_counts_a_shard():
    from shardbook.comm import ledger

    ledger.FUNCTIONS |= {
        name: (op, "input_tensor") for name, (op, argument) in ledger.FUNCTIONS.items() if op == "all_gather"
    }


@planted_in("zero3", 1, 1, tp=2)
def uncut_gradients_not_summed():
    """Those of norms: each rank of the tensor axis saw tokens of its own. In the first step the loss is exact, the
    gradient 2.1e-2 off; and the ranks drift apart."""
    from shardbook.parallel import sharding

    sharding.sum_replicated_gradients = lambda *given: None


@planted_in("zero3", 1, 1, micros=3, tp=2)
def uncut_gradients_summed_each_micro():
    """The accumulated ones: what was summed is summed again. Loss exact, gradient 9.9e-2 off."""
    from shardbook.parallel.sharding import ShardedModel, sum_replicated_gradients

    real = ShardedModel.micro_batch

    @contextlib.contextmanager
    def micro_batch(sharded, is_last):
        with real(sharded, is_last):
            yield
        if not is_last:
            sum_replicated_gradients(sharded.model, sharded.mesh, sharded.layout)

    ShardedModel.micro_batch = micro_batch


@planted_in("zero3", 1, 1, tp=2)
def uncut_gradients_summed_twice():
    """Loss exact, gradient 6.1e-2 off."""
    from shardbook.parallel import sharding

    real = sharding.sum_replicated_gradients
    sharding.sum_replicated_gradients = lambda *given: [real(*given), real(*given)]


@planted_in("zero3", 1, 1, tp=2)
def gathered_tokens_sliced_in_backward():
    """Each rank keeps of a gradient its own tokens' part, and not the other ranks' summands. Loss exact, gradient 0.78
    off."""
    from shardbook.comm import collectives

    def backward(ctx, grad_output):
        each = grad_output.shape[1] // ctx.ranks.size
        return grad_output[:, ctx.ranks.tp_rank * each :][:, :each].contiguous(), None

    collectives.AllGatherTokens.backward = staticmethod(backward)


@planted_in("zero3", 1, 2, clips=True, tp=2)
def norm_skips_what_is_cut_twice():
    """torch's placement of it says that it is no shard. Loss and gradient exact, the norm 33% too small."""
    from torch.distributed.tensor.placement_types import _StridedShard

    from shardbook.optim import clip

    real = clip.gradient_norm

    def gradient_norm(gradients, **more):
        _StridedShard.is_replicate = lambda placement: True
        found = real(gradients, **more)
        del _StridedShard.is_replicate  # its own, not the inherited one
        return found

    clip.gradient_norm = gradient_norm


@planted_in("zero3", 1, 1, clips=True, tp=2)
def norm_counts_uncut_on_each_rank():
    """Loss and gradient exact, the norm 0.2% too large."""
    from shardbook.optim import clip

    real = clip.gradient_norm
    clip.gradient_norm = lambda gradients, **more: real(
        gradients + [each for each in gradients if "tp" not in each.device_mesh.mesh_dim_names], **more
    )


@planted_in("zero3", 1, 1, tp=2)
def tokens_counted_on_each_rank():
    """As if ranks of the tensor axis had rows of their own: loss and gradient halved."""
    from shardbook.run import prepare

    real = prepare.choose_batching
    prepare.choose_batching = lambda data, plan, rank, *rest, **named: real(
        data, plan, rank._replace(tp_size=1), *rest, **named
    )


@planted_in("zero3", 1, 1, tp=2, model="padded")
def padding_token_is_trained():
    """transformers' embedding leaves the row of config.pad_token_id as it is. Loss exact, gradient 15 times too large:
    that row is zero at first, and the slope of a norm is steep there."""
    from shardbook.parallel.tensor import ShardedEmbedding

    ShardedEmbedding.padding_idx = property(lambda module: None, lambda module, value: None)


@planted_in("zero3", 1, 2, cp=2)
def slopes_of_other_slices_lost():
    """What other slices made of this one's keys and values sends nothing back. Loss exact."""
    from shardbook.comm.collectives import AllToAll

    real = AllToAll.backward
    AllToAll.backward = staticmethod(lambda ctx, grad_output: (real(ctx, grad_output)[0] * 0, None, None, None))


@planted_in("zero3", 1, 1, cp=2)
def gradients_divided_by_slices():
    """As if each slice's loss were a mean of its own. Loss exact."""
    from shardbook.parallel.sharding import ShardedModel

    real = ShardedModel.micro_batch

    @contextlib.contextmanager
    def micro_batch(sharded, is_last):
        with real(sharded, is_last):
            yield
        for parameter in sharded.model.parameters():
            parameter.grad = parameter.grad / 2

    ShardedModel.micro_batch = micro_batch


@planted_in("zero3", 1, 1, cp=2)
def positions_restart_in_each_slice():
    from shardbook.data import loader

    real = loader.slice_rows

    def slice_rows(whole, batching):
        made = real(whole, batching)
        return dataclasses.replace(made, position_ids=whole.position_ids[:, : made.position_ids.shape[1]].contiguous())

    loader.slice_rows = slice_rows


@planted_in("zero3", 1, 1, cp=2)
def targets_shifted_after_the_cut():
    """The last token of each slice predicts nothing: one target a slice is lost, and not counted."""
    from shardbook.data import loader

    real = loader.slice_rows

    def slice_rows(whole, batching):
        made = real(whole, batching)
        length = made.input_ids.shape[1]
        kept = (made.positions + 1) % length > 0
        return dataclasses.replace(
            made, positions=made.positions[kept], targets=made.targets[kept], trained=(int(kept.sum()),)
        )

    loader.slice_rows = slice_rows


@planted_in("zero3", 1, 1, cp=2, extra=("data.max_length=256",))
def slices_attend_without_documents():
    """As an attention that is told nothing but that rows are causal. In the run's rows alone: the self-check, whose
    rows are shorter, would refuse the family."""
    from shardbook.model import masks

    real = masks.attention_mask
    masks.attention_mask = lambda kernel, cu_seqlens, shape, packed, *more: real(
        kernel, cu_seqlens, shape, packed and shape[1] != 256, *more
    )


@planted_in("zero3", 1, 1, cp=2)
def slices_attend_alone():
    """The first slice's tokens stand for those of all: no exchange."""
    from shardbook.comm import collectives

    collectives.all_to_all = lambda sent, _, splits, ranks: sent.new_empty(sum(splits)).copy_(
        sent.repeat(2)[: sum(splits)]
    )


@planted_in("zero3", 1, 1, cp=2)
def tokens_counted_on_each_slice():
    """As tp's ranks, which see the same tokens: here loss and gradient double."""
    from shardbook.run import prepare

    real = prepare.choose_batching
    prepare.choose_batching = lambda data, how, at, *rest, **named: real(
        data, how, at._replace(tp_size=2), *rest, **named
    )


@planted_in("zero3", 1, 1, cp=2)
def context_ranks_read_other_rows():
    from shardbook.run import prepare

    real = prepare.choose_batching
    prepare.choose_batching = lambda data, how, at, *rest, **named: real(
        data, how, at._replace(dp_rank=at.cp_rank, dp_size=2), *rest, **named
    )


@planted_in("zero3", 1, 1, cp=4)
def keys_dealt_out_to_others():
    """Two heads of keys on four ranks: each computes with the wrong one."""
    from shardbook.parallel import context

    real = context.partition_heads
    context.partition_heads = lambda heads, keys, size: [
        (own, [1 - key for key in needed]) for own, needed in real(heads, keys, size)
    ]


@planted_in("zero3", 1, 1, extra=("train.per_device_train_batch_size=2",), tp=2)
def tensor_ranks_shuffle_alone():
    """The rows of a micro-batch in another order on each: loss 1.8e-2 off, gradient 0.59. With other rows, of which
    another number of tokens is trained, gloo ends the run: what the loss gathers has two sizes."""
    import torch.distributed as dist

    from shardbook.data import loader

    def build_micro_batch(encoded, rows, *more):
        return real(encoded, rows[::-1] if dist.get_rank() else rows, *more)

    real = loader.build_micro_batch
    loader.build_micro_batch = build_micro_batch


@planted_in("zero3", 1, 1, micros=3, pp=2)
def gradients_scaled_by_micros():
    """The loss that is shown is divided, that of which gradients are taken is not."""
    from shardbook.parallel.step import run_step

    def run_scaled(sharded, micros, loss_function, device, *mark):
        def scaled(*given):
            shares = loss_function(*given)
            return shares.detach() + len(micros) * (shares - shares.detach())

        return run_step(sharded, micros, scaled, device, *mark)

    replace(run_step, run_scaled)


@planted_in("zero2", 1, 1, micros=3, pp=2)
def activations_of_the_micro_before():
    """What is sent is what was made before."""
    from shardbook.parallel.pipeline import PipelineLinks

    real, earlier = PipelineLinks.send, {}

    def send(links, tensor, is_forward):
        before = earlier.get(is_forward, tensor)
        earlier[is_forward] = tensor
        real(links, before if is_forward and before.shape == tensor.shape else tensor, is_forward)

    PipelineLinks.send = send


@planted_in("zero2", 1, 1, micros=3, pp=2)
def slopes_of_another_micro():
    """Of two micro-batches on their way the last is taken first. In the first step the loss is exact."""
    from shardbook.parallel.step import MicroBatchRunner

    real = MicroBatchRunner.backward

    def backward(passes, action, *more):
        first, *others = passes.outputs
        if others:
            passes.outputs[first], passes.outputs[others[-1]] = passes.outputs[others[-1]], passes.outputs[first]
        return real(passes, action, *more)

    MicroBatchRunner.backward = backward


@planted_in("zero1", 1, 2, micros=3, pp=2)
def reduced_after_the_last_forward():
    """The last backward of a step told by the forwards, as in a loop without stages: gradients right, bytes more."""
    from shardbook.parallel.step import MicroBatchRunner

    real, seen = (MicroBatchRunner.forward, MicroBatchRunner.backward), []
    MicroBatchRunner.forward = lambda passes, action, *more: (
        seen.append(action.micro),
        real[0](passes, action, *more),
    )[1]
    MicroBatchRunner.backward = lambda passes, action, is_last, came: real[1](passes, action, seen[-1] == 2, came)


@planted_in("zero3", 1, 1, pp=2)
def tied_ends_not_summed():
    from shardbook.parallel.pipeline import PipelineLinks

    PipelineLinks.sum_tied = lambda links, model: None


@planted_in("zero3", 1, 1, micros=3, pp=2)
def tied_ends_summed_in_one_alone():
    """The head's half goes to the embedding, and nothing comes back."""
    from shardbook.parallel.pipeline import PipelineLinks

    real = PipelineLinks.sum_tied

    def sum_tied(links, model):
        (weight,) = links.tied_weights(model)
        before = weight.grad.clone()
        real(links, model)
        if links.pipeline.has_last_pp_stage:
            weight.grad = before

    PipelineLinks.sum_tied = sum_tied


@planted_in("zero3", 1, 1, clips=True, tied=False, pp=2)
def norm_of_own_layers_alone():
    """Each stage of the model scales by a norm of its own."""
    from shardbook.optim import clip

    real = clip.gradient_norm
    clip.gradient_norm = lambda gradients, known=None, group=None: real(gradients, known)


@planted_in("zero3", 1, 1, clips=True, pp=2)
def norm_counts_both_tied_ends():
    """Loss and gradient exact."""
    from shardbook.parallel.pipeline import PipelineLinks

    real = PipelineLinks.parameters
    PipelineLinks.parameters = lambda links, model: dataclasses.replace(real(links, model), tied=[])


ON_HOST = ("offload.optimizer=cpu",)


@planted_in("zero3", 1, 1, micros=3, tp=2, extra=ON_HOST)
def uncut_gradients_on_the_host_not_summed():
    """In the first step the loss is exact, the gradient 2.1e-2 off; and the ranks drift apart."""
    from shardbook.parallel import sharding

    sharding.sum_replicated_gradients = lambda *given: []


@planted_in("zero3", 1, 1, clips=True, tp=2, extra=ON_HOST)
def norm_on_the_host_of_partial_sums():
    """Its squares are those of what came, from before the sum over ranks."""
    from shardbook.parallel.sharding import ShardedModel

    real = ShardedModel.sum_partial_gradients
    ShardedModel.sum_partial_gradients = lambda sharded, masters: ([], real(sharded, masters)[1])


@planted_in("zero3", 1, 1, micros=3, pp=2, extra=ON_HOST)
def tied_ends_on_the_host_not_summed():
    from shardbook.parallel.pipeline import PipelineLinks

    PipelineLinks.sum_tied = lambda links, model: []


@planted_in("zero3", 1, 1, clips=True, pp=2, extra=ON_HOST)
def norm_on_the_host_counts_both_tied_ends():
    norm_counts_both_tied_ends()


@planted_in("zero3", 1, 1, clips=True, tied=False, pp=2, extra=ON_HOST)
def norm_on_the_host_of_own_layers_alone():
    norm_of_own_layers_alone()


@planted_in("zero3", 1, 1, pp=2)
def tokens_counted_on_each_stage():
    """Loss and gradient halved."""
    from shardbook.run import prepare

    real = prepare.choose_batching
    prepare.choose_batching = lambda data, how, at, *rest, **named: real(
        data, how, at._replace(pp_size=1), *rest, **named
    )


@planted_in("zero3", 1, 2, 4, model="deep", pp=2, chunks=2, schedule="interleaved")
def chunks_share_their_hooks():
    """As if one root were over both: after a backward of one chunk the other's units are done with, too."""
    import copy

    from shardbook.parallel import pipeline
    from shardbook.parallel.pass_monitor import PassMonitor

    def copy_view(model):
        view, body = copy.copy(model), copy.copy(model.model)
        for module in (view, body):
            module._modules = module._modules.copy()
        view.model = body
        return view

    pipeline.copy_view = copy_view
    PassMonitor.follow = lambda *given, **named: None  # its hooks too: it would refuse the second chunk's forward


def after_applying(change):
    """`change(units)` once, when the stage has been applied."""
    from shardbook.parallel.sharding import apply_stage

    def apply_and_change(model, layout, mesh):
        sharded = apply_stage(model, layout, mesh)
        change(layout.units)
        return sharded

    replace(apply_stage, apply_and_change)


def in_each_micro_batch(change):
    """`change(units)` in every micro-batch, when its schedule has been set."""
    from shardbook.parallel.sharding import ShardedModel

    real = ShardedModel.micro_batch

    @contextlib.contextmanager
    def micro_batch(sharded, is_last):
        with real(sharded, is_last):
            change(sharded.layout.units)
            yield

    ShardedModel.micro_batch = micro_batch


def with_other_units(change):
    """The layout has the units `change(units)`, for whoever applies or predicts."""
    from shardbook.parallel import placement

    real = placement.build_layout

    def build_layout(*given):
        layout = real(*given)
        return dataclasses.replace(layout, units=change(layout.units))

    placement.build_layout = build_layout


def run_planted(name, *args):
    """`run_cases(*args)` on this rank with a bug in the package."""
    BUGS[name][0]()
    return run_cases(*args)
