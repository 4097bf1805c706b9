"""The console: what rank 0 tells the person who started the run. Other ranks say nothing.

A progress bar on a terminal, plain lines elsewhere (a log file, CI), the same content in both.
"""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from shardbook.comm.collectives import Switches
from shardbook.comm.ledger import Traffic
from shardbook.data.loader import Loader
from shardbook.data.tokenized import Documents
from shardbook.parallel.mesh import DP_SHARD, describe_sizes
from shardbook.parallel.stages import Stage, backward_depth
from shardbook.parallel.units import Unit
from shardbook.plan.formulas import predict_gathered_peak, predict_resident, predict_unsent
from shardbook.recipe import Parallel, Recipe
from shardbook.run.metrics import Metrics

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Output(Console):
    def on_broken_pipe(self) -> None:
        """Where nobody reads any more, a run goes on unheard: rich would end it."""
        self.quiet = True


class Teller:
    """Says things on rank 0, and shows how far the loop is while used as a context."""

    def __init__(self, is_main: bool):
        terminal = sys.stdout.isatty()  # rich itself would take FORCE_COLOR for one
        self.console = Output(quiet=not is_main, highlight=False, soft_wrap=True, force_terminal=terminal)
        if not self.console.is_terminal:
            self.console.width = 140  # a log file has no edge to wrap at
        self.progress: Progress | None = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def data(self, documents: Documents, held_out: Documents | None) -> None:
        self.say(f"train    {documents.summary}")
        if held_out:
            self.say(f"eval     {held_out.summary}")

    def layout(
        self,
        stage: Stage,
        sizes: dict[str, int],
        recipe: Recipe,
        units: list[Unit],
        switches: Switches,
        model: nn.Module,
        loader: Loader,
        steps: int,
    ) -> None:
        """What is in effect, as a table: printed once, before the first step."""
        precision, batching = recipe.precision, loader.batching
        kept = predict_resident(units, sizes, shard_rank=0, precision=precision)
        whole = predict_gathered_peak(units, sizes, recipe.parallel, precision)
        own = [unit for unit in units if unit.shapes]
        freed = sum(unit.reshards for unit in own)
        ahead = f"ahead {max(0, recipe.parallel.forward_prefetch)} forward, {backward_depth(recipe.parallel)} backward"
        alone = sizes[DP_SHARD] == 1  # nothing is gathered, only copied to the dtype of compute
        table = Table(title="effective layout", show_header=False, title_justify="left")
        table.add_row("stage", f"{stage.name} ({stage.source})")
        table.add_row("mesh", describe_sizes(sizes))
        table.add_row("units", f"{len(own)}, wrapped by {recipe.parallel.wrap}; {freed} freed after forward")
        if not alone:
            table.add_row("gathered", f"{readable_bytes(whole)} of parameters at most, {ahead}")
        if stage.switches != "no":
            table.add_row("ZeRO++", describe_switches(switches, units, sizes, recipe.parallel))
        table.add_row("recomputed", recipe.activation.checkpointing + ", compiled" * recipe.train.compile)
        table.add_row("parameters", f"{sum(p.numel() for p in model.parameters()):,}")
        table.add_row(
            "dtypes",
            f"kept {precision.master}, computed {precision.params}, reduced {precision.reduce}, "
            f"returned {precision.output}",
        )
        table.add_row(
            "a rank keeps",
            f"{readable_bytes(kept.params_bytes)} parameters, {readable_bytes(kept.grads_bytes)} reduced gradients, "
            f"{readable_bytes(kept.optimizer_bytes)} optimizer state",
        )
        table.add_row(
            "a step",
            f"{loader.rows_per_step} rows: {batching.ranks} ranks x {loader.accumulation} micro-batches x "
            f"{batching.batch_size}; {steps} steps",
        )
        self.console.print(table)

    def traffic(self, measured: Traffic, predicted: Traffic) -> None:
        """What the first step sent, and whether the formulas had said so."""

        def describe(traffic: Traffic) -> str:
            return ", ".join(
                f"{op} over {axis} {readable_bytes(volume.payload_bytes)} in {volume.calls} calls"
                for (op, axis), volume in sorted(traffic.items())
            )

        said = "as predicted" if measured == predicted else f"but predicted were {describe(predicted)}"
        self.say(f"traffic  {describe(measured)}; {said}")

    def start(self, done: int, steps: int) -> "Teller":
        self.steps = steps
        if self.console.is_terminal and not self.console.quiet:
            shown = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[now]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
            )
            self.progress = Progress(*shown, TimeRemainingColumn(), console=self.console, transient=False)
            self.task = self.progress.add_task("train", total=steps, completed=done, now="")
        return self

    def __enter__(self) -> "Teller":
        if self.progress:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress:
            self.progress.stop()

    def advance(self, step: int, metrics: Metrics) -> None:
        """Show a finished step; without its metrics (not a logging step) only a progress bar moves."""
        parts = []
        if "train/loss" in metrics:
            parts.append(f"loss {metrics['train/loss']:.4f}")
        if "eval/loss" in metrics:
            parts.append(f"eval {metrics['eval/loss']:.4f}")
        if speed := metrics.get("perf/tokens_per_second_per_device"):
            parts.append(f"{speed:,.0f} tokens/s a device")
        if self.progress:
            self.progress.update(self.task, completed=step)
            if parts:
                self.progress.update(self.task, now="  ".join(parts))
        elif parts:
            left = (self.steps - step) * metrics.get("perf/step_seconds", 0)
            eta = f"  ETA {int(left // 60)}:{int(left % 60):02d}" if left else ""
            self.say(f"step {step}/{self.steps}  " + "  ".join(parts) + eta)


def describe_switches(switches: Switches, units: list[Unit], sizes: dict[str, int], parallel: Parallel) -> str:
    """What is on, at which bits, what it leaves out; and what was asked for and has nothing to do here."""
    if sizes[DP_SHARD] == 1:
        return "off: one rank shards nothing"
    on = []
    one_node = switches.inside == sizes[DP_SHARD]
    if switches.weights_bits:
        on.append(f"qwZ: weights gathered in {switches.weights_bits} bits")
    if switches.secondary:
        on.append(f"hpZ: backward gathers among {switches.secondary} ranks")
    elif parallel.secondary_shard:
        on.append(f"hpZ has nothing to do: all {sizes[DP_SHARD]} ranks of dp_shard are one group of it already")
    if switches.gradients_bits:
        hops = [f"{bits} bits among {ranks} ranks" for _, ranks, bits in switches.hops(sizes[DP_SHARD])]
        why = "" if len(hops) > 1 else ", one hop: there is one node" if one_node else ", one hop: one rank a node"
        on.append(f"qgZ: gradients in {', then '.join(hops)}{why}")
    if kept := predict_unsent(units, sizes, switches):
        on.append(f"error feedback: {readable_bytes(kept)} more, in each rank's memory and part of a checkpoint")
    left = [unit for unit in units if unit.shapes and not switches.quantizes(unit.numel)]
    if left and (switches.weights_bits or switches.gradients_bits):
        on.append(f"{len(left)} units of {sum(unit.numel for unit in left):,} parameters unquantised")
    return "; ".join(on) or "off"


def readable_bytes(count: float) -> str:
    """`1.5 GiB`"""
    for unit in UNITS:
        if count < 1024 or unit == UNITS[-1]:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError
