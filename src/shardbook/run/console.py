"""The console: rank 0's lines for the person who started the run. Other ranks print nothing.

A progress bar on a terminal, plain lines elsewhere (a log file, CI), the same content in both.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import rich.console
from rich.filesize import pick_unit_and_suffix
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from shardbook.comm.ledger import Traffic
from shardbook.comm.versions import describe_newer
from shardbook.memory.host_state import offloaded_bytes
from shardbook.model.attention import PLAIN
from shardbook.model.selfcheck import check_family
from shardbook.parallel.layout import Layout
from shardbook.parallel.mesh import describe_sizes
from shardbook.plan.axes import describe_pipeline, describe_sharing
from shardbook.plan.formulas import predict_gathered_peak, predict_resident
from shardbook.plan.peak import Peak
from shardbook.ranks.exits import PREEMPTED
from shardbook.run.metrics import Metrics
from shardbook.run.prepare import Job
from shardbook.terminal import LOG_WIDTH

PEAK_OFF = 0.05  # a predicted peak that is more off than this is reported
UNITS = ["B", "KiB", "MiB", "GiB", "TiB"]

# metrics that one watches, beside the loss, by their names behind train/ and eval/
WATCHED = {
    "rewards/accuracies": ("accuracy", ".0%"),
    "rewards/margins": ("margin", ".3f"),
    "accuracy": ("accuracy", ".0%"),
    "margin": ("margin", ".3f"),
    "kl": ("kl", ".4f"),
}


class Output(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Keeps the run going, silently, where its output is closed: rich would end it."""
        self.quiet = True


class Console:
    """Prints on rank 0, and shows how far the loop is inside `start`."""

    def __init__(self, is_main: bool):
        terminal = sys.stdout.isatty()  # rich itself would take FORCE_COLOR for one
        self.output = Output(quiet=not is_main, highlight=False, soft_wrap=True, force_terminal=terminal)
        if not self.output.is_terminal:
            self.output.width = LOG_WIDTH
        self.progress: Progress | None = None

    def print(self, text: str) -> None:
        self.output.print(text, markup=False)

    def show_stopped(self, name: str, newest: Path | None, step: int, steps: int) -> int:
        """Shows the step at which a run stopped on request, and how to continue it: from its own `newest`
        checkpoint or, without one, from its beginning. Returns the exit code."""
        saved = f"after step {step} of {steps}, checkpoint saved" if newest else "before its first step"
        self.print(f"stopped  {saved}; continue with run.name={name}")
        return PREEMPTED

    def show_job(self, job: Job) -> None:
        """Shows the data, the effective layout and the forecast of a step: once, before anything is built."""
        self.print(f"train    {job.documents.summary}")
        if job.held_out:
            self.print(f"eval     {job.held_out.summary}")
        if job.prompts.left_out:
            self.print(f"samples  {job.prompts.left_out}")
        if newer := describe_newer():
            self.print(f"versions {newer}")
        self.output.print(describe_layout(job))
        if seconds := job.forecast.get("predicted/perf/step_seconds"):
            self.print(f"forecast {seconds:.2f} s a step of full rows (arithmetic: docs/planning.md)")

    def show_traffic(self, measured: Traffic, predicted: Traffic) -> None:
        """Shows the first step's traffic, and whether it was as predicted."""

        def describe(traffic: Traffic) -> str:
            return ", ".join(
                f"{op} over {axis} {readable_bytes(volume.payload_bytes)} in {volume.calls} calls"
                for (op, axis), volume in sorted(traffic.items())
            )

        said = "as predicted" if measured == predicted else f"but predicted were {describe(predicted)}"
        self.print(f"traffic  {describe(measured)}; {said}")

    @contextmanager
    def start(self, done: int, steps: int) -> Iterator[None]:
        """Shows progress around the loop: `done` of its `steps` are finished."""
        self.steps = steps
        if self.output.is_terminal and not self.output.quiet:
            shown = ("step", MofNCompleteColumn(), BarColumn(), "{task.fields[now]}", TimeElapsedColumn(), "ETA")
            self.progress = Progress(*shown, TimeRemainingColumn(), console=self.output)
            self.task = self.progress.add_task("train", total=steps, completed=done, now="")
        with self.progress or nullcontext():
            yield

    def show_step(self, step: int, metrics: Metrics) -> None:
        """Shows a finished step; without its metrics (not a logging step) only a progress bar moves."""
        if said := describe_peak(metrics):
            self.print(said)
        losses = {"train/loss": "loss", "eval/loss": "eval"}
        parts = [f"{word} {metrics[name]:.4f}" for name, word in losses.items() if name in metrics]
        for name, (word, form) in WATCHED.items():
            if (value := metrics.get(f"train/{name}", metrics.get(f"eval/{name}"))) is not None:
                parts.append(f"{word} {value:{form}}")
        if speed := metrics.get("perf/tokens_per_second_per_device"):
            parts.append(f"{speed:,.0f} tokens/s a device")
        if self.progress:
            self.progress.update(self.task, completed=step)
            if parts:
                self.progress.update(self.task, now="  ".join(parts))
        elif parts:
            left = (self.steps - step) * metrics.get("perf/step_seconds", 0)
            eta = f"  ETA {int(left // 60)}:{int(left % 60):02d}" if left else ""
            self.print(f"step {step}/{self.steps}  " + "  ".join(parts) + eta)

    def show_sample(self, step: int, prompt: str, completion: str) -> None:
        """Shows the end of a sample's prompt and the beginning of its completion, on one line."""
        asked, answer = " ".join(prompt.split()), " ".join(completion.split())
        self.print(f"sample   step {step}: {'...' * (len(asked) > 48)}{asked[-48:]} -> {answer[:72]}")


def describe_layout(job: Job) -> Table:
    """Returns the effective layout as a table."""
    layout, peak, batching = job.layout, job.peak, job.batching
    precision = layout.precision
    own = [unit for unit in layout.units if unit.shapes]
    frees = sum(unit.frees for unit in own)
    here = "whole on each rank" if layout.tp_size == 1 else "of each its own part on each rank"
    freed = f"{frees} freed in each micro-batch" if layout.shards > 1 else here
    table = Table(title="effective layout", show_header=False, title_justify="left")
    table.add_row("stage", f"{layout.stage.name} ({layout.stage.source})")
    table.add_row("mesh", describe_sizes(layout.mesh))
    if sharing := describe_sharing(layout):
        table.add_row("tensor", sharing)
    if stages := describe_pipeline(layout, job.loader.accumulation):
        table.add_row("pipeline", stages)
    table.add_row("units", f"{len(own)}; {freed}")
    if layout.shards > 1:
        ahead = f"ahead {layout.forward_prefetch} forward, {layout.backward_prefetch} backward"
        whole = readable_bytes(predict_gathered_peak(layout))
        table.add_row("gathered", f"{whole} of parameters at most, {ahead}")
    if layout.stage.switches != "no":
        table.add_row("ZeRO++", describe_switches(layout))
    family = check_family(job.config)
    asked = f" (its family asks for {str(family.demands).removeprefix(' and ')})" if family.demands != PLAIN else ""
    table.add_row("attention", f"{job.attention.name}, told of documents by {job.attention.metadata}{asked}")
    if family.unreached:
        table.add_row("frozen", f"what gets no gradient: {', '.join(family.unreached)}")
    table.add_row("recomputed", job.recipe.activation.checkpointing + ", compiled" * job.recipe.train.compile)
    trained = sum(unit.padded_numel(1, trained_only=True) for unit in own)
    count = sum(unit.parameters for unit in own)
    is_part = trained < sum(unit.numel for unit in own)
    at_rest = precision.frozen + ", matrices of blocks in four bits" * job.recipe.model.load_in_4bit
    frozen = f"; {trained:,} of them trained, the others at rest in {at_rest}" * (is_part and job.recipe.lora.r > 0)
    of_first = " in the layers of the first rank, as all that follows" * bool(stages)
    table.add_row("parameters", f"{count:,}{of_first}{frozen}")
    computed = f"computed {precision.params}, reduced {precision.reduce}"
    table.add_row("dtypes", f"kept {precision.master}, {computed}")
    state = predict_resident(layout, 0, job.recipe.optim.name)
    parts = state.params_bytes, state.grads_bytes, state.optimizer_bytes
    params, grads, optimizer = map(readable_bytes, parts)
    table.add_row("a rank keeps", f"{params} parameters, {grads} reduced gradients, {optimizer} optimizer state")
    if layout.offload.optimizer != "none":
        away = [f"{readable_bytes(size)} of {where}" for where, size in offloaded_bytes(layout, 0).items()]
        table.add_row("off the device", f"{', '.join(away)}: masters, moments, sums of gradients")
    table.add_row("at its peak", describe_parts(peak) if peak else f"not predicted: {job.unplanned}")
    micros = f"{batching.dp_size} ranks x {job.loader.accumulation} micro-batches x {batching.batch_size}"
    table.add_row("a step", f"{job.loader.rows_per_step} rows: {micros}; {job.steps} steps")
    return table


def describe_parts(peak: Peak) -> str:
    parts = (peak.params + peak.grads + peak.optimizer, peak.gathered, peak.buffers, peak.activations, peak.working)
    kept, gathered, buffers, held, work = map(readable_bytes, parts)
    more = f"{kept} kept, {gathered} gathered, {buffers} on the wire, {held} of activations, {work} of work"
    return f"{readable_bytes(peak.total)} (on a GPU, predicted): {more}"


def describe_peak(metrics: Metrics) -> str:
    """Returns a line where the peak in `metrics` is more than 5% off the predicted one; else an empty string."""
    measured, predicted = metrics.get("memory/peak_bytes"), metrics.get("predicted/memory/peak_bytes")
    if not (measured and predicted) or abs(predicted / measured - 1) <= PEAK_OFF:
        return ""
    said = f"{readable_bytes(measured)} measured, {readable_bytes(predicted)} predicted"
    return f"peak     {said}: {predicted / measured - 1:+.0%}"


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


def readable_bytes(count: float) -> str:
    """Returns bytes for people: `1.5 GiB`."""
    scale, unit = pick_unit_and_suffix(int(count), UNITS, 1024)
    return f"{count / scale:,.{int(scale > 1)}f} {unit}"
