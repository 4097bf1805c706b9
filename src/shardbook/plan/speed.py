"""The time of a step on a cluster, by arithmetic: matrix products, attention, memory traffic, the optimizer, and the
all-gathers and reductions that nothing hides.

Invariant: an estimate for a recipe's header and for advice, never a measurement: a few rates of the GPU and of its
links, and every term a count. Roofline: Williams et al., CACM 52(4), 2009; alpha-beta: Hockney, 1994.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import compress

from transformers import PreTrainedConfig

from shardbook.axes import PP_FORWARD, TP, WORLD
from shardbook.gpus import gpu_of
from shardbook.model.flops import Flops
from shardbook.optim.muon import orthogonal_flops
from shardbook.optim.table import OPTIMIZERS, Optimizer
from shardbook.parallel.layout import Layout
from shardbook.parallel.schedule import bubble
from shardbook.parallel.units import Unit
from shardbook.plan.activation_bytes import without_adapters
from shardbook.plan.block_traffic import read_inside
from shardbook.plan.events import Collectives, muon_exchanges, step_passes
from shardbook.plan.formulas import count_moves, count_traffic
from shardbook.plan.hardware import ATTENTION, MEMORY, PCIE_SHARE, PRODUCTS, Cluster
from shardbook.plan.measure_blocks import kinds_of, measure_blocks
from shardbook.recipe import Recipe

PASSES = 3.5  # over what a block reads and writes beside its products: once forward, and backward twice and a half
MOVED = 0.939  # of what a block keeps where nothing is made again: what one pass reads and writes beside its products
LINK_SHARE = 0.04  # of products' time: SMs and bandwidth that collectives take, hidden though they are

# is told the number of the pass, what is done (forward, backward, gather, reduce), its unit, its beginning and its end
Tracer = Callable[[int, str, Unit | None, float, float], None]


@dataclass(frozen=True)
class StepTime:
    """The seconds of one optimizer step, by part."""

    products: float
    attention: float
    memory: float  # norms, sums, gates, the loss; casts and copies of parameters and gradients
    link: float  # the GPU's share that collectives take while they are hidden
    optimizer: float
    exposed: float  # collectives that nothing hides
    offload: float = 0.0  # steps on the host, and transfers, that nothing hides
    bubble: float = 0.0  # stages of a pipeline that others wait for: its beginning and its end

    @property
    def seconds(self) -> float:
        return sum(asdict(self).values())

    @property
    def update(self) -> float:
        """The seconds of the optimizer's step that nothing hides, on the device or on the host."""
        return self.optimizer + self.offload


def predict_step(
    layout: Layout,
    config: PreTrainedConfig,
    recipe: Recipe,
    flops: Flops,
    document_tokens: float,
    cluster: Cluster,
    note: Tracer | None = None,
) -> StepTime:
    """Returns the time of a step of full rows of documents of `document_tokens` each, compiled. Ranks along tp and cp
    share the work; in a pipeline each stage is taken to be as long as this rank's."""
    gpu, slowness = cluster.gpu, cluster.slowness
    peak_flops, memory_rate = gpu.flops / slowness, MEMORY * gpu.memory / slowness  # of memory: read plus written
    itemsize, hidden = layout.dtype("params").itemsize, config.hidden_size
    micros = recipe.train.gradient_accumulation_steps
    tokens = recipe.micro_tokens // layout.cp_size
    pairs = recipe.micro_tokens * min(document_tokens, recipe.data.max_length)
    tp_size = layout.tp_size
    vocab_rows = layout.share_of(recipe.outputs(config.vocab_size))
    head = vocab_rows * hidden
    kinds, checkpointing = kinds_of(config), recipe.activation.checkpointing
    numbers = layout.blocks(len(kinds))
    # share of forward's products that backward makes again: of selective none
    recomputed = 0.0 if checkpointing == "selective" else len(recipe.activation.recomputed(numbers)) / len(numbers)
    frozen_forwards = recipe.forwards_per_micro - 1  # forwards without a backward, for each micro-batch
    # multiply-adds: forward, and the gradient of what went in; of weights where they are trained
    pipeline = layout.pipeline
    layer_share = len(numbers) / len(kinds)  # of the model's blocks that are this rank's
    blocks = layer_share * (flops.block * (2 + recomputed + frozen_forwards) + flops.block_trained) / tp_size
    blocks += more_expert_products(layout, recomputed + frozen_forwards)
    head, vocab_rows = head * pipeline.has_last_pp_stage, vocab_rows * pipeline.has_last_pp_stage
    units = [unit for unit in layout.units if not unit.forward_only]
    shapes = (shape for unit in units for shape in compress(unit.shapes, unit.trained))
    passes_of_head = 2 + recipe.recomputes_logits + frozen_forwards + any(shape[0] == vocab_rows for shape in shapes)
    products = 2 * tokens * (blocks + head * passes_of_head) / (PRODUCTS * peak_flops)
    plain = without_adapters(recipe)
    measured = measure_blocks(config, plain, "none", layout.precision.params, **layout.block_sizes).blocks
    rank_blocks = [measured[kinds[number]] for number in numbers]
    queries = sum(block.attention for block in rank_blocks) / layout.cp_size
    # of the scores that are not masked
    attention = 2 * queries * pairs * (3 + recomputed + frozen_forwards) / (ATTENTION * peak_flops)
    # norms, sums, rotation, gates; the loss: fp32 logits five times
    untouched = measure_blocks(config, plain, "none", layout.precision.params).blocks
    moved_numel = MOVED * sum(untouched[kinds[number]].kept.token for number in numbers) / tp_size
    if layout.expert_load > 1:  # by as much as more rows keep more
        loaded = measure_blocks(
            config, plain, "none", layout.precision.params, layout.expert_load, **layout.block_sizes
        ).blocks
        kept = (loaded[kinds[n]].kept.token - measured[kinds[n]].kept.token for n in numbers)
        moved_numel += MOVED * sum(kept)
    passes = (PASSES + (1 if checkpointing == "selective" else recomputed) + frozen_forwards) * moved_numel
    # a base in four bits is unpacked for each of its products, by one kernel
    unpacked = layer_share * flops.block * (2 + recomputed + frozen_forwards) * (0.5 + itemsize)
    unpacked *= recipe.model.load_in_4bit
    memory = (tokens * (passes + vocab_rows * 5 * 4) + unpacked) / memory_rate
    # casts, copies in and out of a gather, and of a reduction, of each parameter; AdamW, norm and clipping of a shard
    sharded = {unit: layout.shards_of(unit) > 1 for unit in layout.units}
    moved = sum(unit.numel if is_sharded else unit.cast_numel(itemsize) for unit, is_sharded in sharded.items())
    trained_of = {unit: unit.padded_numel(1, trained_only=True) for unit in layout.units}
    trained = sum(trained_of.values())
    copies = (moved * 2 * 2 * itemsize + trained * (itemsize + 2 * 4)) / memory_rate
    row, shard = OPTIMIZERS[recipe.optim.name], sum(n // layout.shards_of(unit) for unit, n in trained_of.items())
    optimizer = optimizer_seconds(layout, row, shard, peak_flops, memory_rate)
    teacher_seconds = 0.0  # a teacher's forward, its logits gone over as the student's
    if flops.beside and layout.teacher:
        beside = measure_blocks(layout.teacher, plain, "none", layout.precision.params).blocks
        moved_numel = MOVED * sum(beside[kind].kept.token for kind in kinds_of(layout.teacher))
        more_products = tokens * flops.beside.per_token / 2 / (PRODUCTS * peak_flops)
        more_attention = flops.beside.per_pair * pairs / 3 / (ATTENTION * peak_flops)
        more_memory = tokens * (moved_numel + layout.teacher.vocab_size * 5 * 4) / memory_rate
        products, attention, memory = products + more_products, attention + more_attention, memory + more_memory
        teacher_seconds = more_products + more_attention + more_memory
    link = LINK_SHARE * (products + attention) * (layout.world_size > 1)
    exposed = inside = inside_seconds(layout, config, recipe, cluster)
    micro = products + attention + memory + copies + link + inside / micros
    forward = (micro - teacher_seconds) / (3 + recomputed + frozen_forwards)
    forward_and_backward = forward + teacher_seconds, micro - teacher_seconds - (1 + frozen_forwards) * forward
    exposed += exposed_seconds(layout, cluster, micros, *forward_and_backward, frozen_forwards, note)
    if row.whole_matrices:
        groups = layout.groups(0)
        exposed += sum(cluster.ring_seconds(size, groups[axis]) for _, axis, size in muon_exchanges(layout))
    if pipeline.ranks > 1:
        exposed += passing_seconds(layout, config, tokens, cluster)
    offload_time = offload_seconds(layout, cluster, micros, *forward_and_backward)
    waits = bubble(pipeline.ranks, micros, pipeline.chunks) * micros * micro
    computing = micros * products, micros * attention, micros * (memory + copies), micros * link
    return StepTime(*computing, optimizer, exposed, offload_time, waits)


def more_expert_products(layout: Layout, again: float) -> float:
    """Returns the multiply-adds, for each of this rank's tokens, of the rows that its experts receive beyond the mean;
    forward's are made `again` so often."""
    more = 0.0
    for unit in layout.expert_units:
        trained = unit.padded_numel(1, trained_only=True) / unit.numel
        more += (layout.expert_load - 1) * layout.chosen_share * unit.parameters * (2 + again + trained)
    return more


def optimizer_seconds(layout: Layout, row: Optimizer, shard: int, peak_flops: float, memory_rate: float) -> float:
    """Returns the seconds in which the device steps a shard of `shard` elements, norm and clipping included."""
    master = layout.dtype("master").itemsize
    moments = 2 * row.state_bytes(shard, master)  # read and written
    is_on_device = not layout.steps_on_host
    seconds = (shard * 10 * master + moments) / memory_rate * is_on_device
    if row.whole_matrices:  # each rank makes its share of matrices orthogonal
        matrices = [shape for unit in layout.units for shape in unit.trained_matrices]
        seconds += sum(map(orthogonal_flops, matrices)) / layout.shards / (PRODUCTS * peak_flops)
    return seconds


def inside_seconds(layout: Layout, config: PreTrainedConfig, recipe: Recipe, cluster: Cluster) -> float:
    """Returns the seconds of all collectives along tp, cp and ep in a step, which nothing hides."""
    if layout.tp_size == layout.cp_size == layout.ep_size == 1:
        return 0.0
    groups, inside = layout.groups(0), read_inside(layout, config, recipe)
    few = inside[: layout.pipeline.ranks]  # one micro-batch sends what another does
    passes = step_passes(layout, len(few), recipe.forwards_per_micro, few)
    events = (event for each in passes for event in each.events if event.what in ("compute", "exchange"))
    sent, seconds = count_traffic(events), 0.0
    for (_, axis), moved in sent.items():
        ranks = groups[axis] if axis != WORLD else range(layout.world_size)
        ring = cluster.ring_seconds(moved.payload_bytes / moved.calls, [*ranks])
        seconds += len(inside) / len(few) * moved.calls * ring
    if layout.tp_size > 1:
        seconds += 2 * cluster.ring_seconds(layout.replicated_numel * layout.dtype("master").itemsize, groups[TP])
    return seconds


def passing_seconds(layout: Layout, config: PreTrainedConfig, tokens: int, cluster: Cluster) -> float:
    """Returns the seconds in which activations and gradients travel between pipeline stages while nothing computes: the
    first micro-batch's through all stages, and back; other sends overlap with their neighbors' computing."""
    payload = tokens // layout.tp_size * config.hidden_size * layout.dtype("params").itemsize
    once = cluster.ring_seconds(2 * payload, layout.groups(0)[PP_FORWARD])  # all of it goes one way
    return 2 * (layout.pipeline.ranks * layout.pipeline.chunks - 1) * once


def offload_seconds(layout: Layout, cluster: Cluster, micros: int, forward: float, backward: float) -> float:
    """Returns the seconds of a step in which the GPU waits for its host: the time of host AdamW that one forward does
    not hide, and the time by which transfers are longer than all computing."""
    if not layout.steps_on_host:
        return 0.0
    moves = dict(count_moves(layout, 0, micros))
    numel = sum(unit.numel / layout.shards_of(unit) for unit in layout.units)
    summed = moves.pop("sum", Counter[str]())  # of gradients, between backward and the step
    moved, paged = sum(moves.values(), Counter[str]()), moves["fetch"]["disk_read"]
    host = cluster.step_seconds(numel, moved["disk_read"] - paged, moved["disk_written"])
    rate = PCIE_SHARE * cluster.gpu.pcie
    transfers = max(moved["to_host"] / rate, moved["to_device"] / rate, cluster.a_node * paged / cluster.gpu.disk)
    waits = max(0.0, host - forward) + max(0.0, transfers - micros * (forward + backward))
    return waits + (summed["to_host"] + summed["to_device"]) / rate


def model_flops(recipe: Recipe, flops: Flops, document_tokens: float) -> float:
    """Returns the model FLOPs of one rank in a step of full rows; ranks along tp, cp and pp share a model's."""
    train, shared = recipe.train, recipe.parallel.micro_batch_ranks
    tokens = recipe.micro_tokens * train.gradient_accumulation_steps / shared
    return flops.of(tokens, tokens * min(document_tokens, recipe.data.max_length))


def predict_perf_metrics(
    layout: Layout, config: PreTrainedConfig, recipe: Recipe, flops: Flops, document_tokens: float, device_name: str
) -> dict[str, float]:
    """Returns the metric `predicted/perf/step_seconds` on GPUs that CUDA calls `device_name`, in their usual nodes;
    nothing where these are not known, or blocks are not compiled."""
    gpu = gpu_of(device_name)
    if gpu is None or not gpu.a_node or not recipe.train.compile:
        return {}
    cluster = Cluster(gpu, layout.world_size, layout.ranks_per_node, gpu.nics)
    step = predict_step(layout, config, recipe, flops, document_tokens, cluster)
    return {"predicted/perf/step_seconds": step.seconds}


def exposed_seconds(
    layout: Layout,
    cluster: Cluster,
    micros: int,
    forward: float,
    backward: float,
    more: int = 0,
    note: Tracer | None = None,
) -> float:
    """Returns the seconds of a step in which the GPU waits for gathers and reductions, which a link beside it serves.

    `forward`, `backward`: seconds of computing of one micro-batch, shared among units by their parameters. A unit's own
    gather is asked for when the unit before begins (the host runs ahead of the device, and reductions have their own
    communicator), a prefetch when the unit begins that prefetches; a reduction when its backward is over. `more`:
    forwards without a backward before each micro-batch's own. `note` is told each computing, gather and reduction.
    """
    note = note or (lambda *_: None)
    groups, parts = layout.groups(0), [unit for unit in layout.units if unit.numel]
    # a token meets few of the experts that are a unit of their own
    share = layout.chosen_share * layout.expert_load
    weight = {unit: unit.parameters * (share if unit.is_experts else 1.0) for unit in layout.units}
    parameters = sum(weight[unit] for unit in parts if unit.read_in_backward)
    everything = parameters + sum(weight[unit] for unit in parts if unit.forward_only)
    gpu = link = 0.0  # when they are free again

    @cache
    def seconds(sends: Collectives) -> float:
        rings = ((op, cluster.ring_seconds(payload, groups[axis])) for op, axis, payload in sends if payload)
        return sum(2 * ring if op == "all_reduce" else ring for op, ring in rings)

    def serve(asked: float, took: float, unit: Unit | None, what: str = "gather") -> float:
        nonlocal link
        link = max(link, asked) + took
        note(number, what, unit, link - took, link)
        return link

    for number, (action, events) in enumerate(step_passes(layout, micros, 1 + more)):
        asked, arrivals, reductions = dict[Unit, float](), dict[Unit, float](), list[tuple[float, float, Unit | None]]()
        began = gpu
        if not action.is_forward:  # of root-like units the head is first, and the lookup at the end takes no time
            heads = [unit for unit in layout.chunks[action.chunk].units if unit.is_root_like and unit.read_in_backward]
            gpu += backward * sum(weight[unit] for unit in heads) / parameters
            note(number, "backward", heads[0] if heads else None, began, gpu)
        for what, unit, sends in events:
            if what == "compute" and unit:
                while unit in asked:
                    first = next(iter(asked))
                    arrivals[first] = serve(began, asked.pop(first), first)
                for each in reductions:
                    serve(*each, "reduce")
                began = gpu = max(gpu, arrivals.get(unit, 0.0))
                for other, took in asked.items():
                    arrivals[other] = serve(began, took, other)
                asked, reductions = {}, []
                if action.is_forward:
                    gpu += forward * weight[unit] / everything * (unit.read_in_backward or unit.forward_only)
                else:
                    gpu += backward * weight[unit] / parameters * (unit.read_in_backward and not unit.is_root_like)
                note(number, "forward" if action.is_forward else "backward", unit, began, gpu)
            elif sends and what == "gather" and unit:
                asked[unit] = seconds(sends)
            elif sends and what == "reduce" and (took := seconds(sends)):
                reductions.append((gpu, took, unit))
        for each in reductions:
            serve(*each, "reduce")
    return max(0.0, max(link, gpu) - micros * ((1 + more) * forward + backward))
