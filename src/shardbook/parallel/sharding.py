"""Sharding: applies a layout to a model with fully_shard, and sets what each micro-batch of a step gathers and reduces.

Invariant: gradients are SUMS over ranks (the loss is already divided by the global token count), so every divide
factor is 1. `shard_model` does the same for a loop of one's own: see docs/library.md.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardbook.axes import DP_REPLICATE, DP_SHARD
from shardbook.comm.collectives import SumOverRanks
from shardbook.comm.zeropp_collectives import QuantizedAllGather, QuantizedReduceScatter, share_secondary_mesh
from shardbook.local_tensors import local_part
from shardbook.parallel.byte_gather import gather_bytes
from shardbook.parallel.context import set_cp_group
from shardbook.parallel.dispatch import Splits
from shardbook.parallel.expert_load import ExpertLoad, build_expert_load
from shardbook.parallel.experts import EPGroup, find_experts, place_experts
from shardbook.parallel.layout import Layout
from shardbook.parallel.mesh import build_node_mesh, regroup_mesh
from shardbook.parallel.pass_monitor import PassMonitor
from shardbook.parallel.pipeline import PipelineLinks, build_pipeline_links
from shardbook.parallel.replicated import ReplicatedParameters
from shardbook.parallel.router_bias import RouterBiases, build_router_biases
from shardbook.parallel.tensor import divide_summed_gradients, place_on_mesh, sum_replicated_gradients


@dataclass
class ShardedModel:
    """A model under its stage. Every parameter is a DTensor, Shard(0) along dp_shard and Replicate along dp_replicate,
    and sharded along tp where its matrix is, along ep where it is of experts; or, where `replicated` is set, a plain
    tensor: each rank has all of it."""

    model: nn.Module
    layout: Layout
    replicated: ReplicatedParameters | None = None
    mesh: DeviceMesh | None = None  # set where it has an axis tp
    parts: "list[ShardedModel]" = field(default_factory=list)  # one for each chunk of layers, where there are several
    links: PipelineLinks | None = None  # to the neighbours along pp
    cp_process_group: ProcessGroup | None = None  # the ranks that have slices of the same rows
    ep_group: EPGroup | None = None  # the ranks that share experts
    expert_load: ExpertLoad | None = None  # where choices of experts are counted
    router_biases: RouterBiases | None = None  # where routers have some for the choice of experts
    offloaded: Any = None  # memory/host_adamw.py's HostAdamW, where masters are not on the device
    # called before gradients are summed along tp, while it returns True
    check_first_gradients: Callable[[], bool] | None = None
    is_last: bool = True  # the step's last micro-batch; True by default: a loop that never sets it always reduces

    @property
    def masters(self) -> nn.Module:
        """The module that has the parameters at rest, in the master dtype, by the model's names, all steps done."""
        return self.offloaded.masters() if self.offloaded else self.model

    @property
    def gradients(self) -> Any:
        """The holder of the gradients after a step's last backward: the parameters, or the offloaded optimizer."""
        return self.offloaded or self.parameters_of(self.model)

    @property
    def tied_names(self) -> set[str]:
        """The names of the parameters that another part of the model, on other ranks, has too."""
        return {self.links.tied_name} if self.links and self.links.ends else set()

    @property
    def chunks(self) -> "list[ShardedModel]":
        """The models that run by themselves: this one, or each of its parts."""
        return self.parts or [self]

    def sum_slices(self, part: Tensor) -> Tensor:
        """Returns the sum of the `part` [sequences] of every slice of this rank's rows, fp32. Collective along cp."""
        return part if self.cp_process_group is None else SumOverRanks.apply(part, self.cp_process_group)

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of traffic between device, host and disk; empty without offload."""
        return self.offloaded.take_metrics() if self.offloaded else {}

    def note_routing(self) -> None:
        """Has dispatches note from now on, until `take_routing`, how many rows this rank sends and receives."""
        if self.ep_group:
            self.ep_group.noted = []

    def take_routing(self) -> list[Splits]:
        """Returns what this rank sent and received in dispatches, of each block with experts in each forward, in order;
        empty without ep."""
        noted = self.ep_group.noted if self.ep_group else None
        if self.ep_group:
            self.ep_group.noted = None
        return noted or []

    def upload_shards(self) -> None:
        """Copies weights that were just loaded into `masters` to where they are used."""
        if self.offloaded:
            self.offloaded.upload_shards()

    def begin_step(self) -> None:
        if self.expert_load:
            self.expert_load.clear()
        if self.offloaded:
            self.offloaded.begin_step()

    def end_step(self) -> None:
        """Ends a step's last backward: waits for messages under way, and sums the gradient of a tied weight over both
        ends of a pipeline. Collective."""
        if self.links:
            self.links.finish()
            if not self.offloaded:
                self.links.sum_tied(self.model)

    def sum_partial_gradients(self, masters: nn.Module) -> tuple[list[nn.Parameter], int]:
        """Sums those gradients of the offloaded `masters` of which ranks have partial sums: along tp, and over both
        ends of a pipeline. Returns their parameters, and the bytes that each rank sent. Collective."""
        mesh, numel = self.chunks[0].mesh, self.layout.replicated_numel
        replicated = sum_replicated_gradients(masters, mesh, self.layout) if mesh else []
        tied = self.links.sum_tied(masters) if self.links else []
        numel += sum(local_part(weight).numel() for weight in tied)
        return replicated + tied, numel * self.layout.dtype("master").itemsize

    def parameters_of(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """Returns the parameters of `model`, which has this rank's; of a pipeline's stage also who has the others."""
        return self.links.parameters(model) if self.links else model.parameters()

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Sets which gradients the backward of one micro-batch reduces and which parameters it frees (gradient
        accumulation, DDP's no_sync); opened around its forward and backward, or around its backward alone. `is_last`:
        it is the last one of the optimizer step."""
        if self.mesh and self.is_last:
            divide_summed_gradients(self.model, self.layout)
        self.is_last = is_last
        for other in (self.replicated, self.offloaded):
            if other:
                other.begin(is_last)
        if self.replicated:
            yield
            return
        root, syncs, reshards = self._schedule[is_last]
        root.set_requires_gradient_sync(syncs)
        root.set_requires_all_reduce(is_last)  # across replicas gradients are summed once a step, in every stage
        for handle, is_resharded in reshards:
            handle.set_reshard_after_backward(is_resharded, recurse=False)
        yield
        if is_last and self.mesh and not self.offloaded:
            if self.check_first_gradients and not self.check_first_gradients():
                self.check_first_gradients = None
            sum_replicated_gradients(self.model, self.mesh, self.layout)

    @cached_property
    def _schedule(self) -> list[tuple[FSDPModule, bool, list[tuple[FSDPModule, bool]]]]:
        """The settings of a micro-batch, and of the last one of a step: the root, whether it reduces gradients, and of
        each unit whether its parameters are freed after backward."""
        stage, units = self.layout.stage, self.layout.units
        settings = [[(unit.handle, unit.reshards_after_backward(last)) for unit in units] for last in (False, True)]
        return [(units[-1].handle, stage.syncs(last), settings[last]) for last in (False, True)]

    def fill_gradients(self) -> None:
        """Sets, after a step's last backward, zeros as the gradients of trained parameters that no rank reached, in
        every stage. fully_shard does so only for units that were ever gathered, so whether an optimizer decays such a
        weight would depend on its past."""
        if self.is_last and not self.offloaded and not (self.replicated and self.replicated.gathered):
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    @contextlib.contextmanager
    def gathered_once(self) -> Iterator[None]:
        """Keeps, around forwards without backward, gathered parameters for the next; then frees them and restores
        settings. With hpZ each forward gathers again, inside the node: a secondary mesh cannot be set twice."""
        gathering = [part for part in self.chunks if not part.replicated and not part.layout.switches.secondary]
        freed = [unit.handle for part in gathering for unit in part.layout.units if unit.reshard_after_forward]
        for handle in freed:
            handle.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for handle in freed:
                handle.set_reshard_after_forward(True, recurse=False)
            self.reshard()

    def reshard(self) -> None:
        """Frees gathered parameters. Needed after an evaluation: a forward without backward leaves them gathered."""
        for part in self.chunks:
            if part.replicated:
                part.replicated.free()
            else:
                for unit in part.layout.units:
                    unit.handle.reshard()


def apply_stage(model: nn.Module, layout: Layout, mesh: DeviceMesh, ours: bool = True) -> ShardedModel:
    """Puts `model` under its stage, in place; `mesh` has the axes of `layout.sizes`. Tensors of the model may lie on
    the meta device; all others are moved to the mesh's device.

    Where there is more than one shard each unit is wrapped with fully_shard, inner before outer, the root last. A model
    of several chunks of layers has a root for each: after a backward of one nothing is done to the others. `ours`: the
    process is Shardbook's own, so nobody else has made process groups.

    One unit of weights w on four ranks along dp_shard, with its gradient g and its moments m:

                        rank 0      rank 1      rank 2      rank 3
        at rest         w0          w1          w2          w3
        forward         w0 to w3    w0 to w3    w0 to w3    w0 to w3    all-gather; then zero3 frees what it gathered
        backward        w0 to w3    w0 to w3    w0 to w3    w0 to w3    zero3 gathers again
        its end         g0          g1          g2          g3          reduce-scatter; zero1 once, at a step's last one
        optimizer       w0 g0 m0    w1 g1 m1    w2 g2 m2    w3 g3 m3    no communication

    With two replicas of two shards (hsdp) ranks 0 and 2 both hold w0, ranks 1 and 3 both w1: gathers and reductions are
    among 0 and 1, and among 2 and 3; once a step gradients are summed among 0 and 2, and among 1 and 3.
    """
    cp_process_group = set_cp_group(model, layout)
    links = build_pipeline_links(model, layout, mesh)
    monitor = PassMonitor()  # one for all chunks: an error in one of them broke the whole model
    roots = [chunk.units[-1].modules[0] for chunk in layout.chunks]
    # losses are fp32; hidden states for the next pipeline stage are not
    dtypes = [
        torch.float32 if layout.pipeline.is_last(chunk) else layout.dtype("params") for chunk in range(len(roots))
    ]
    meshes = [mesh] + [regroup_mesh(mesh, sizes) for sizes in layout.meshes[1:]]
    parts = list(map(_apply, roots, layout.chunks, dtypes, repeat(meshes), repeat(monitor)))
    for part in parts:
        monitor.follow(part.model, gathers=not part.replicated, end=part.fill_gradients)
    if ours and layout.shards > 1 and mesh.device_type == "cuda":
        separate_reductions(roots)
    sharded = parts[0] if len(parts) == 1 else ShardedModel(model, layout, parts=parts)
    sharded.links, sharded.cp_process_group = links, cp_process_group
    sharded.ep_group = next((module.ep_group for module in find_experts(model)), None)
    sharded.expert_load = build_expert_load(model, roots, layout)
    sharded.router_biases = build_router_biases(model, layout)
    return sharded


def _apply(
    model: nn.Module, layout: Layout, output: torch.dtype, meshes: list[DeviceMesh], monitor: PassMonitor
) -> ShardedModel:
    mesh = meshes[0]
    if layout.is_replicated:
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(mesh.device_type)
        replicas = mesh.get_group(DP_REPLICATE) if layout.replicas > 1 else None  # ranks with the same parameters
        return ShardedModel(model, layout, ReplicatedParameters(model, layout, replicas, output, monitor))
    full_mesh = mesh if layout.tp_size > 1 else None
    if full_mesh:
        place_on_mesh(model, layout.placements, full_mesh)
    switches, shards, hops = layout.switches, layout.shards, build_hops(layout, mesh)
    if layout.ep_size > 1:
        place_experts(model, meshes[-1])
    order = [*layout.units[-2::-1], layout.units[-1]]
    with share_secondary_mesh():
        for unit in order:
            policy = MixedPrecisionPolicy(
                param_dtype=layout.dtype("params"),
                reduce_dtype=layout.dtype("reduce"),
                output_dtype=output if unit is order[-1] else None,
                cast_forward_inputs=not unit.is_experts,  # a router's weights stay in its dtype
            )
            along = meshes[-1 if unit.is_experts else 0]
            # Not 2-D for one replica: fully_shard would all-reduce along the first axis, in a group of one rank.
            along = along[DP_REPLICATE, DP_SHARD] if layout.replicas_of(unit) > 1 else along[DP_SHARD]
            modules = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            reshards = unit.reshard_after_forward and ((unit.gathers_again and switches.secondary) or True)
            fully_shard(modules, mesh=along, mp_policy=policy, reshard_after_forward=reshards)
    for unit in order:
        gather_bytes(unit)
        # SUM with factor 1: the default divides by the number of ranks, though the loss is divided already. The plain
        # sum is forced because gloo has no pre-multiplied one.
        unit.handle.set_gradient_divide_factor(1.0)
        unit.handle.set_force_sum_reduction_for_comms(True)
        unit.handle.set_unshard_in_backward(unit.read_in_backward)
        if hasattr(unit.handle, "set_reduce_scatter_unused_params"):  # torch >= 2.13
            # Where only some ranks used a parameter the others reduce zeros: else ranks would sum unequal buffers.
            unit.handle.set_reduce_scatter_unused_params(True, recurse=False)
        if unit.shapes and switches.weights_bits:
            unit.handle.set_custom_all_gather(QuantizedAllGather(shards, switches.weights_bits))
        if unit.shapes and hops:
            unit.handle.set_custom_reduce_scatter(QuantizedReduceScatter(hops))
    apply_prefetch(layout)
    return ShardedModel(model, layout, mesh=full_mesh)


def separate_reductions(roots: list[nn.Module]) -> None:
    """Gives the reduce-scatters of all `roots` a communicator of their own, where torch can (2.13): NCCL runs the
    collectives of one in turn, so in backward an all-gather would wait for the reduce-scatter before it. (gloo runs all
    in turn.) Collective: torch names it by how many groups a rank is in already, which must be equal along dp_shard."""
    if separate := getattr(FSDPModule, "set_separate_reduce_scatter_group", None):
        separate(nn.ModuleList(roots))


def build_hops(layout: Layout, mesh: DeviceMesh) -> list[tuple[ProcessGroup, int]]:
    """Returns the process group and bits of each exchange of a quantised reduction."""
    where = build_node_mesh(mesh, layout.switches.inside) if len(layout.hops) > 1 else mesh
    return [(where.get_group(axis), bits) for axis, _, bits in layout.hops]


def apply_prefetch(layout: Layout) -> None:
    """Sets how many units are gathered ahead of the running one, as the layout says (prefetch).

    Always explicit in backward: torch's own order is the reverse of the forwards since the last backward, so the first
    backward after an evaluation would gather, for nothing, a unit that the evaluation ran. A list that names only the
    unit itself, which is gathered already, prefetches none.
    """
    for is_forward in (True, False):
        for unit, prefetched in layout.run_order(is_forward):
            ahead = [other.handle for other in prefetched] or [unit.handle]
            if not is_forward:
                unit.handle.set_modules_to_backward_prefetch(ahead)
            elif layout.parallel.forward_prefetch >= 0:
                unit.handle.set_modules_to_forward_prefetch(ahead)
