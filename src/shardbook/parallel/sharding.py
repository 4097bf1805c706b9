"""Sharding: a layout is applied to a model with fully_shard, and steered through the micro-batches of a step.

Invariant: gradients are SUMS over ranks (the loss is already divided by the global token count), so every divide
factor is 1. `shard_model` is the same for a loop of one's own: see docs/library.md.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardbook.axes import DP_REPLICATE, DP_SHARD
from shardbook.comm.collectives import QuantizedAllGather, QuantizedReduceScatter, share_secondary_mesh
from shardbook.parallel.context import lend_group
from shardbook.parallel.copies import Copies
from shardbook.parallel.layout import Layout
from shardbook.parallel.mesh import build_node_mesh, describe_sizes
from shardbook.parallel.packed import gather_bytes
from shardbook.parallel.pipeline import Links, build_links
from shardbook.parallel.tensor import place_cuts, sum_uncut
from shardbook.parallel.units import Unit, backward_order
from shardbook.parallel.watch import Watch


@dataclass
class ShardedModel:
    """A model under its stage. Every parameter is a DTensor, Shard(0) along dp_shard and Replicate along dp_replicate,
    of its part where it is cut along tp; or a plain tensor, where one rank has it all: `copies` is set."""

    model: nn.Module
    layout: Layout
    # of error feedback, flat fp32, by what they belong to: state that a checkpoint must hold, and that fits only where
    # the name is the same; empty where nothing keeps any
    residuals: dict[str, Tensor]
    copies: Copies | None = None
    mesh: DeviceMesh | None = None  # where it has an axis tp
    # of each chunk of layers that runs by itself, where there are several; and what passes between ranks of them
    parts: "list[ShardedModel]" = field(default_factory=list)
    links: Links | None = None
    offloaded: Any = None  # memory/offload.py's, where masters are not on the device
    is_last: bool = True  # of the micro-batches of a step; a loop that says nothing reduces after each backward

    @property
    def masters(self) -> nn.Module:
        """What has the parameters at rest, in the dtype of masters, by the model's names. All steps are done."""
        return self.offloaded.masters() if self.offloaded else self.model

    @property
    def gradients(self) -> Any:
        """What has them after a step's last backward: the parameters, or what took them off the device."""
        if self.links:
            return self.links.parameters(self.model)
        return self.offloaded.optimizer if self.offloaded else self.model.parameters()

    @property
    def chunks(self) -> "list[ShardedModel]":
        """What runs by itself: all of it, or each of its parts."""
        return self.parts or [self]

    def take_metrics(self) -> dict[str, float]:
        """What moved between the device and elsewhere; nothing where nothing does."""
        return self.offloaded.take_metrics() if self.offloaded else {}

    def spread(self) -> None:
        """What was loaded into `masters` goes to where it is used."""
        if self.offloaded:
            self.offloaded.spread()

    def begin_step(self) -> None:
        if self.offloaded:
            self.offloaded.begin_step()

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch, or around its backward: what that reduces and which
        parameters it frees. `is_last`: of the optimizer step."""
        self.is_last = is_last
        for other in (self.copies, self.offloaded):
            if other:
                other.begin(is_last)
        if self.copies:
            yield
            return
        stage, units = self.layout.stage, self.layout.units
        root = units[-1].handle
        root.set_requires_gradient_sync(stage.syncs(is_last))
        root.set_requires_all_reduce(is_last)  # across replicas gradients are summed once a step, in every stage
        for unit in units:
            # after the last micro-batch always: the optimizer makes gathered parameters stale
            unit.handle.set_reshard_after_backward(unit.frees or is_last, recurse=False)
        yield
        if is_last and self.mesh:
            sum_uncut(self.model, self.mesh, self.layout.uncut_numel)

    def fill_gradients(self) -> None:
        """A backward is over: after a step's last one what no rank reached has zeros, in every stage. fully_shard alone
        makes them for units that were ever gathered, so optimizers would decay a weight or not by its past."""
        if self.is_last and not self.offloaded and not (self.copies and self.copies.gathered):
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    @contextlib.contextmanager
    def gathered_once(self) -> Iterator[None]:
        """Around forwards without backward: what one gathers stays for the next. Then nothing stays, and settings are
        as before. With hpZ each forward gathers again, inside: a secondary mesh cannot be set twice."""
        again = not self.copies and not self.layout.switches.secondary
        freed = [unit.handle for unit in self.layout.units if again and unit.reshard_after_forward]
        for handle in freed:
            handle.set_reshard_after_forward(False, recurse=False)
        yield
        for handle in freed:
            handle.set_reshard_after_forward(True, recurse=False)
        self.reshard()

    def reshard(self) -> None:
        """Free what is gathered. Needed after an evaluation: a forward without backward leaves parameters gathered."""
        for part in self.chunks:
            if part.copies:
                part.copies.free()
            else:
                for unit in part.layout.units:
                    unit.handle.reshard()


def apply_stage(model: nn.Module, layout: Layout, mesh: DeviceMesh, ours: bool = True) -> ShardedModel:
    """Put `model` under its stage, in place; `mesh` has the axes of `layout.sizes`. The model may lie on the meta
    device; what does not is moved to the mesh's, where residuals of error feedback are made too.

    Where there is more than one shard each unit is wrapped with fully_shard, inner before outer, the root last. A model
    of several chunks of layers has a root for each: after a backward of one nothing is done to the others. `ours`: the
    process is, too, so that nobody else has made process groups.
    """
    lend_group(model, layout)
    links = build_links(layout, mesh)
    views: Any = getattr(model, "chunks", None) or [model]
    watch = Watch()  # one: what broke in a chunk of layers broke the model
    parts = [_apply(view, own, mesh, watch) for view, own in zip(views, layout.chunks, strict=True)]
    if ours and layout.shards > 1 and mesh.device_type == "cuda":
        separate_reductions(views)
    if len(parts) == 1:
        parts[0].links = links
        return parts[0]
    return ShardedModel(model, layout, {}, parts=parts, links=links)


def _apply(model: nn.Module, layout: Layout, mesh: DeviceMesh, watch: Watch) -> ShardedModel:
    output = layout.dtype("output") if getattr(model, "ends", True) else layout.dtype("params")
    if layout.copies:
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(mesh.device_type)
        replicas = mesh.get_group(DP_REPLICATE) if layout.replicas > 1 else None  # the ranks that hold the same
        return _watched(ShardedModel(model, layout, {}, Copies(model, layout, replicas, output, watch)), watch)
    whole = mesh if layout.alike > 1 else None
    if whole:
        place_cuts(model, whole)
    switches, shards, hops = layout.switches, layout.shards, build_hops(layout, mesh)
    # A 2-D mesh makes fully_shard all-reduce along the first axis, with one replica in a group of one.
    mesh = mesh[DP_REPLICATE, DP_SHARD] if layout.replicas > 1 else mesh[DP_SHARD]
    order, residuals = [*layout.units[-2::-1], layout.units[-1]], dict[str, Tensor]()
    with share_secondary_mesh():
        for unit in order:
            policy = MixedPrecisionPolicy(
                param_dtype=layout.dtype("params"),
                reduce_dtype=layout.dtype("reduce"),
                output_dtype=output if unit is order[-1] else None,
            )
            modules = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            reshards = unit.reshard_after_forward and ((unit.gathers_again and switches.secondary) or True)
            fully_shard(modules, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    for number, unit in enumerate(order):
        gather_bytes(unit)
        # SUM with factor 1: the default divides by the number of ranks, which would divide twice; forcing the plain
        # sum matters because gloo knows no pre-multiplied one.
        unit.handle.set_gradient_divide_factor(1.0)
        unit.handle.set_force_sum_reduction_for_comms(True)
        unit.handle.set_unshard_in_backward(unit.read_in_backward)
        if hasattr(unit.handle, "set_reduce_scatter_unused_params"):  # torch >= 2.13
            # a parameter that only some ranks used: the others reduce zeros, else ranks would sum unlike buffers
            unit.handle.set_reduce_scatter_unused_params(True, recurse=False)
        if unit.shapes and switches.quantizes(unit.numel):
            if switches.weights_bits:
                unit.handle.set_custom_all_gather(QuantizedAllGather(shards, switches.weights_bits, switches.block))
            if hops:
                residual = None
                if kept := layout.residual_numel(unit):
                    shapes = " ".join("x".join(map(str, shape)) for shape in compress(unit.shapes, unit.trained))
                    name = f"{number}: {shapes} over {describe_sizes(layout.sizes)}, {layout.hops}"
                    residual = residuals[name] = torch.zeros(kept, device=mesh.device_type)
                unit.handle.set_custom_reduce_scatter(QuantizedReduceScatter(hops, switches.block, residual))
    apply_prefetch(layout)
    return _watched(ShardedModel(model, layout, residuals, mesh=whole), watch)


def _watched(sharded: ShardedModel, watch: Watch) -> ShardedModel:
    watch.follow(sharded.model, gathers=not sharded.copies, end=sharded.fill_gradients)
    return sharded


def separate_reductions(roots: list[nn.Module]) -> None:
    """Give the reduce-scatters of all `roots` one communicator of their own, where torch can (2.13): NCCL runs what
    shares one in turn, and in backward a gather waits for the reduction before it. (gloo's run in turn anyhow.)
    Collective: torch names the group by how many groups a rank is in already, which must be alike along dp_shard."""
    if separate := getattr(FSDPModule, "set_separate_reduce_scatter_group", None):
        separate(nn.ModuleList(roots))


def build_hops(layout: Layout, mesh: DeviceMesh) -> list[tuple[ProcessGroup, int]]:
    """The process group and bits of each exchange of a quantised reduction."""
    where = build_node_mesh(mesh, layout.switches.inside) if len(layout.hops) > 1 else mesh
    return [(where.get_group(axis), bits) for axis, _, bits in layout.hops]


def apply_prefetch(layout: Layout) -> None:
    """Gather so many units ahead of the running one.

    Always explicit in backward: torch's own order is the reverse of the forwards since the last backward, so the first
    backward after an evaluation would gather, for nothing, a unit that the evaluation ran. A list that names only the
    unit itself, which is gathered already, stands for none.
    """
    *inner, root = layout.units
    units: list[Unit] = [root, *inner] if root.shapes else inner  # in forward order
    for run, depth, is_forward in (
        (units, layout.forward_prefetch, True),
        (backward_order(units), layout.backward_prefetch, False),
    ):
        handles = [unit.handle for unit in run]
        for number, handle in enumerate(handles):
            ahead = handles[number + 1 : number + 1 + depth] or [handle]
            if not is_forward:
                handle.set_modules_to_backward_prefetch(ahead)
            elif layout.parallel.forward_prefetch >= 0:
                handle.set_modules_to_forward_prefetch(ahead)
