"""The summary of a job: its data, effective layout and forecast, for the person who starts it."""

from rich.table import Table

from shardbook.comm.versions import describe_newer
from shardbook.memory.host_state import offloaded_bytes
from shardbook.model.attention import PLAIN
from shardbook.model.expert_products import is_packed
from shardbook.model.marks import STACKED
from shardbook.model.selfcheck import check_family
from shardbook.parallel.layout import Layout
from shardbook.parallel.mesh import describe_sizes
from shardbook.plan.block_traffic import describe_experts, describe_pipeline, describe_sharing
from shardbook.plan.formulas import predict_gathered_peak, predict_resident
from shardbook.plan.peak import Peak
from shardbook.run.prepare import Job
from shardbook.terminal import readable_bytes


def describe_job(job: Job) -> list[str | Table]:
    """Returns the data, the effective layout and the forecast of a step, as lines and a table."""
    parts: list[str | Table] = [f"train    {job.documents.summary}"]
    if job.held_out:
        parts.append(f"eval     {job.held_out.summary}")
    if job.prompts.left_out:
        parts.append(f"samples  {job.prompts.left_out}")
    if newer := describe_newer():
        parts.append(f"versions {newer}")
    parts.append(describe_layout(job))
    if seconds := job.forecast.get("predicted/perf/step_seconds"):
        parts.append(f"forecast {seconds:.2f} s a step of full rows (arithmetic: docs/planning.md)")
    return parts


def describe_layout(job: Job) -> Table:
    """Returns the effective layout as a table."""
    layout, peak, batching = job.layout, job.peak, job.batching
    precision = layout.precision
    units = [unit for unit in layout.units if unit.shapes]
    frees = sum(unit.reshard_after_backward for unit in units)
    is_split = describe_sharing(layout) or layout.expert_units
    copies = "of each its own part on each rank" if is_split else "whole on each rank"
    freed = f"{frees} freed in each micro-batch" if layout.shards > 1 else copies
    table = Table(title="effective layout", show_header=False, title_justify="left")
    table.add_row("stage", f"{layout.stage.name} ({layout.stage.source})")
    table.add_row("mesh", describe_sizes(layout.mesh))
    if sharing := describe_sharing(layout):
        table.add_row("tensor", sharing)
    if experts := describe_experts(layout, job.config, job.recipe):
        table.add_row("experts", experts)
    if stages := describe_pipeline(layout, job.loader.accumulation):
        table.add_row("pipeline", stages)
    table.add_row("units", f"{len(units)}; {freed}")
    if layout.shards > 1:
        ahead = f"ahead {layout.forward_prefetch} forward, {layout.backward_prefetch} backward"
        gathered = readable_bytes(predict_gathered_peak(layout))
        table.add_row("gathered", f"{gathered} of parameters at most, {ahead}")
    if layout.stage.switches != "no":
        table.add_row("ZeRO++", describe_switches(layout))
    family = check_family(job.config)
    asked = f" (its family asks for {str(family.demands).removeprefix(' and ')})" if family.demands != PLAIN else ""
    table.add_row("attention", f"{job.attention.name}, told of documents by {job.attention.metadata}{asked}")
    if family.without_gradient:
        table.add_row("frozen", f"what gets no gradient: {', '.join(family.without_gradient)}")
    table.add_row("recomputed", job.recipe.activation.checkpointing + ", compiled" * job.recipe.train.compile)
    placements = [layout.placements[name] for name, _ in job.model.named_parameters()]
    trained = sum(placed.numel for placed in placements if placed.trained)
    count = sum(unit.parameters for unit in units)
    is_part = any(not placed.trained for placed in placements)
    at_rest = precision.frozen + ", matrices of blocks in four bits" * job.recipe.model.load_in_4bit
    stacks = [module for module in job.model.modules() if getattr(module, STACKED, None)]
    if job.recipe.model.load_in_4bit and not all(map(is_packed, stacks)):
        at_rest += " but for experts, which are not behind transformers' interface of them"
    frozen = f"; {trained:,} of them trained, the others at rest in {at_rest}" * (is_part and job.recipe.lora.r > 0)
    of_first = " in the layers of the first rank, as all that follows" * bool(stages)
    table.add_row("parameters", f"{count:,}{of_first}{frozen}")
    computed = f"computed {precision.params}, reduced {precision.reduce}"
    table.add_row("dtypes", f"kept {precision.master}, {computed}")
    state = predict_resident(layout, 0, job.recipe.optim.name)
    parts = state.params_bytes, state.grads_bytes, state.optimizer_bytes
    params, grads, optimizer = map(readable_bytes, parts)
    table.add_row("a rank keeps", f"{params} parameters, {grads} reduced gradients, {optimizer} optimizer state")
    if layout.steps_on_host:
        away = [f"{readable_bytes(size)} of {where}" for where, size in offloaded_bytes(layout, 0).items()]
        table.add_row("off the device", f"{', '.join(away)}: masters, moments, sums of gradients")
    table.add_row("at its peak", describe_parts(peak) if peak else f"not predicted: {job.no_plan_reason}")
    micros = f"{batching.dp_size} ranks x {job.loader.accumulation} micro-batches x {batching.batch_size}"
    table.add_row("a step", f"{job.loader.rows_per_step} rows: {micros}; {job.steps} steps")
    return table


def describe_parts(peak: Peak) -> str:
    parts = (peak.params + peak.grads + peak.optimizer, peak.gathered, peak.buffers, peak.activations, peak.working)
    kept, gathered, buffers, held, work = map(readable_bytes, parts)
    more = f"{kept} kept, {gathered} gathered, {buffers} on the wire, {held} of activations, {work} of work"
    return f"{readable_bytes(peak.total)} (on a GPU, predicted): {more}"


def describe_switches(layout: Layout) -> str:
    """Returns a line on ZeRO++: parts that are on, their bits, units left out, and switches of no effect here."""
    switches, shards = layout.switches, layout.shards
    if shards == 1:
        return "off: one rank shards nothing"
    on = []
    one_node = switches.inside == shards
    if switches.weights_bits:
        on.append(f"qwZ: weights gathered in {switches.weights_bits} bits")
    if switches.secondary:
        on.append(f"hpZ: backward gathers among {switches.secondary} ranks")
    elif layout.parallel.secondary_shard:
        on.append(f"hpZ has nothing to do: all {shards} ranks of dp_shard are one group of it already")
    if switches.gradients_bits:
        hops = [f"{bits} bits among {ranks} ranks" for _, ranks, bits in layout.hops]
        why = "" if len(hops) > 1 else ", one hop: there is one node" if one_node else ", one hop: one rank a node"
        on.append(f"qgZ: gradients in {', then '.join(hops)}{why}")
    return "; ".join(on) or "off"
