"""The report of a plan: a table for people, JSON for programs (one object with `stages` and `advice`)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from shardbook.memory.shelf import step_bytes
from shardbook.model.laid_out import World, lay_out
from shardbook.plan.advice import Advice, advise
from shardbook.plan.axes import describe_pipeline, describe_sharing, describe_splitting
from shardbook.plan.calibrate import Sample, calibrate
from shardbook.plan.cluster import DISK, DOCUMENT_TOKENS, SHARED, Candidate, Planner, build_planner
from shardbook.plan.formulas import Resident, paper_resident, predict_resident
from shardbook.plan.hardware import ACROSS, ROOM, Cluster, build_cluster
from shardbook.recipe import Precision, Recipe, RecipeError, dump_recipe, find_stage
from shardbook.terminal import build_console

if TYPE_CHECKING:
    from shardbook.plan.simulate import LossFunction, Simulated

GB = 1e9
FORMATS = {"GB": ",.1f", "s": ".2f", "share": ".0%", "ratio": ".2f", "tokens/s": ",.0f", "hours": ",.0f"}  # by unit
PARTS = "kept_bytes", "gathered_bytes", "buffers_bytes", "activations_bytes", "working_bytes"  # of the peak, in `facts`


@dataclass(frozen=True)
class Report:
    """A recipe under every stage on one cluster, and the advice."""

    planner: Planner
    asked: Precision  # as the recipe has it, with its `auto`
    cluster: Cluster
    gpu_name: str
    stages: dict[str, Candidate]
    fewest: dict[str, int | None]
    advice: Advice
    simulated: "Simulated | None" = None  # of the recipe's own stage


def make_report(
    recipe: Recipe,
    gpu: str,
    gpus: int,
    nics: float = 0,
    a_node: int = 0,
    document_tokens: float = DOCUMENT_TOKENS,
    shares: "LossFunction | None" = None,
    host_gb: float = 0,
    samples: Sequence[Sample] = (),
) -> Report:
    """Returns the report of `recipe` on `gpus` of the kind `gpu` (gpus.py), `a_node` of them in a node with `nics`
    Gbit/s to the others and `host_gb` of memory (0: as usual), calibrated by `samples` of measured steps. `shares`, an
    objective's: a step of the recipe's own stage is simulated too, here. Raises RecipeError for an unknown kind or
    model, or where the GPUs make no whole nodes."""
    cluster = build_cluster(gpu, gpus, nics, a_node, host_gb)
    cluster = calibrate(cluster, samples) if samples else cluster
    if document_tokens < 1:
        raise RecipeError(f"--document-tokens {document_tokens:g}: must be at least 1")
    planner = build_planner(recipe, document_tokens)
    stages = planner.stages(cluster)
    fewest = {stage: planner.fewest(stage, cluster) for stage in stages}
    found = None
    if shares:
        from shardbook.plan.simulate import simulate_step  # makes a process group, and loads torch's fake tensors

        world = World(cluster.gpus, cluster.a_node)
        found = simulate_step(lay_out(planner.recipe, world, planner.config, planner.teacher), shares)
    return Report(planner, recipe.precision, cluster, gpu, stages, fewest, advise(planner, cluster), found)


def show_report(report: Report, is_json: bool) -> None:
    """Prints the report on standard output."""
    if is_json:
        print(json.dumps(as_json(report), indent=1))
        return
    console = build_console()
    console.print(as_table(report))
    console.print("GB of a rank: kept, gathered, buffers, activations, work. GPUs: the fewest on which it fits")
    console.print("GPU-h/B: GPU-hours of a billion tokens\n")
    lines = describe_calibrated(report) + describe_simulated(report) + describe_shared(report) + describe_advice(report)
    for line in lines:
        console.print(line, markup=False)


def write_advised(report: Report, path: Path) -> None:
    """Writes the advised recipe to `path`. Raises RecipeError where nothing fits, or it cannot be written."""
    if report.advice.best is None:
        raise RecipeError(f"--write {path}: {report.advice.why}")
    model, cluster = report.planner.recipe.model.path, report.cluster
    recipe = report.advice.best.recipe.model_copy(update={"precision": report.asked})  # with its `auto`
    header = f"# {model}: the fastest that fits {cluster.gpus} x {report.gpu_name}, as `shardbook plan` has it.\n"
    header += "".join(f"# {line}\n" for line in describe_path(report))
    try:
        path.write_text(header + dump_recipe(recipe))
    except OSError as error:
        raise RecipeError(f"--write {path}: cannot be written ({error.strerror})") from None


def as_json(report: Report) -> dict[str, Any]:
    """Returns the report as numbers: bytes of one rank, seconds of a step, tokens a second of one GPU."""
    best = report.advice.best
    return {
        "model": report.planner.recipe.model.path,
        "parameters": report.planner.parameters,
        "gpus": report.cluster.gpus,
        "gpu": report.gpu_name,
        "gpus_a_node": report.cluster.a_node,
        "nics_gbit": report.cluster.nics,
        "slowness": report.cluster.slowness,
        "across": report.cluster.across,
        "room_bytes": report.cluster.room_bytes,
        "document_tokens": report.planner.document_tokens,
        "stages": [
            _row(report, candidate) | {"min_gpus": report.fewest[name]} for name, candidate in report.stages.items()
        ],
        **({"simulated": asdict(report.simulated)} if report.simulated else {}),
        "advice": {
            "fits": best is not None,
            "why": report.advice.why,
            "refused": {found.layout.stage.name: why for found, why in report.advice.refused},
            **({"take": _row(report, best), "recipe": _settings(report, best)} if best else {}),
        },
    }


def _row(report: Report, candidate: Candidate) -> dict[str, Any]:
    train, layout = candidate.recipe.train, candidate.layout
    count = sum(unit.parameters for unit in layout.units)
    return {
        "stage": layout.stage.name,
        "mesh": layout.mesh,
        "checkpointing": candidate.recipe.activation.checkpointing,
        "per_device_train_batch_size": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "paper": _resident(paper_resident(layout.stage, count, layout.shards)),
        "resident": _resident(predict_resident(layout, 0, candidate.recipe.optim.name)),
        "comm": candidate.comm,
        "peak": asdict(candidate.peak),
        **{f"{where}_bytes": size for where, size in candidate.away.items()},
        "fits": candidate.fits,
        "limit": candidate.limit,
        "step": asdict(candidate.time),
        **{key: fact.value for key, fact in facts(report.planner, candidate).items()},
    }


class Fact(NamedTuple):
    """A number of a candidate: its heading, its value (bytes where the unit is GB), and the unit with its format."""

    name: str
    value: float
    unit: str

    @property
    def text(self) -> str:
        return format(self.value / (GB if self.unit == "GB" else 1), FORMATS[self.unit])


def facts(planner: Planner, candidate: Candidate) -> dict[str, Fact]:
    """Returns the numbers that the table, the page, the advice and JSON show of a candidate, by their keys in JSON."""
    peak, time = candidate.peak, candidate.time
    return {
        "kept_bytes": Fact("kept", peak.params + peak.grads + peak.optimizer, "GB"),
        "gathered_bytes": Fact("gathered", peak.gathered, "GB"),
        "buffers_bytes": Fact("buffers", peak.buffers, "GB"),
        "activations_bytes": Fact("activations", peak.activations, "GB"),
        "working_bytes": Fact("work", peak.working, "GB"),
        "peak_bytes": Fact("peak GB", peak.total, "GB"),
        "step_seconds": Fact("step s", time.seconds, "s"),
        "waiting_share": Fact("waits", time.exposed / time.seconds, "share"),
        "tokens_per_second_per_device": Fact("tok/s/GPU", candidate.speed, "tokens/s"),
        "mfu": Fact("MFU", planner.mfu(candidate), "ratio"),
        "gpu_hours_per_billion_tokens": Fact("GPU-h/B", candidate.gpu_hours, "hours"),
    }


def _resident(resident: Resident) -> dict[str, float]:
    return asdict(resident) | {"total_bytes": resident.total_bytes}


def _settings(report: Report, candidate: Candidate) -> dict[str, Any]:
    """Returns the keys that the advice would change, as overrides."""
    recipe, train = candidate.recipe, candidate.recipe.train
    own, asked = recipe.parallel, report.planner.recipe.parallel
    shared = {key: getattr(own, key) for key in SHARED if max(getattr(own, key), getattr(asked, key)) > 1}
    others = recipe.parallel.model_dump(exclude_defaults=True, exclude={"stage"})
    return {
        "parallel.stage": candidate.layout.stage.name,
        **{f"parallel.{key}": value for key, value in others.items()},
        **{f"parallel.{key}": size for key, size in shared.items()},
        **{f"offload.{key}": value for key, value in recipe.offload.model_dump(exclude_defaults=True).items()},
        "activation.checkpointing": recipe.activation.checkpointing,
        "train.per_device_train_batch_size": train.per_device_train_batch_size,
        "train.gradient_accumulation_steps": train.gradient_accumulation_steps,
    }


def as_table(report: Report) -> Table:
    cluster, recipe = report.cluster, report.planner.recipe
    train, count = recipe.train, report.planner.parameters / GB
    room = f"{cluster.room_bytes / GB:.0f} of {cluster.gpu.gb:g} GB can be used ({ROOM:.0%})"
    rows = f"{train.per_device_train_batch_size} rows of {recipe.data.max_length * recipe.sequences} tokens"
    steps = f"{rows} x {train.gradient_accumulation_steps}, checkpointing {recipe.activation.checkpointing}"
    where = f"{cluster.gpus} x {report.gpu_name}: {cluster.words()}; {room}"
    title = f"{recipe.model.path} ({count:.2f} B) on {where}\n{steps}, {recipe.optim.name}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    stages = {name: facts(report.planner, candidate) for name, candidate in report.stages.items()}
    headings = [fact.name for fact in next(iter(stages.values())).values()]
    table.add_column("stage")
    for name in (*headings, "GPUs"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, numbers in stages.items():
        fits = report.stages[name].fits
        largest = max(PARTS, key=lambda key, numbers=numbers: numbers[key].value)
        colours = {"peak_bytes": "green"} if fits else {"peak_bytes": "red", largest: "red"}
        cells = (Text(fact.text, style=colours.get(key, "")) for key, fact in numbers.items())
        table.add_row(name, *cells, str(report.fewest[name] or "-"))
    return table


def describe_calibrated(report: Report) -> list[str]:
    """Returns a line on the constants that measured runs changed; none where they are the usual ones."""
    cluster = report.cluster
    if (cluster.slowness, cluster.across) == (1.0, ACROSS):
        return []
    network = f"; the network gives {cluster.across:.0%} of its rate, not {ACROSS:.0%}" * (cluster.across != ACROSS)
    return [f"measured computing takes {cluster.slowness:.2f} times what data sheets' shares say{network}"]


def describe_simulated(report: Report) -> list[str]:
    """Returns a line with the peak of the simulated step beside the formula's; none where nothing was simulated."""
    if (found := report.simulated) is None:
        return []
    name = find_stage(report.planner.recipe.parallel.stage).name
    formula = report.stages[name].peak.total
    said = f"{name}: {found.peak_bytes / GB:.1f} GB at its fullest, in {found.moment}"
    return [f"simulated {said}; by formula {formula / GB:.1f} ({formula / found.peak_bytes - 1:+.0%})"]


def describe_shared(report: Report) -> list[str]:
    """Returns lines on tp, cp and pp under the recipe's own stage, and under the advice where its sizes differ."""
    own = report.stages[find_stage(report.planner.recipe.parallel.stage).name]
    best = report.advice.best
    if best and best.layout.shared != own.layout.shared:
        return [*_sharing_lines(own), *(f"{line} (advised)" for line in _sharing_lines(best))]
    return _sharing_lines(own)


def _sharing_lines(own: Candidate) -> list[str]:
    told = {"tensor": describe_sharing(own.layout), "context": describe_splitting(own.layout, own.config)}
    told["pipeline"] = describe_pipeline(own.layout, own.recipe.train.gradient_accumulation_steps)
    return [f"{what:<9}{said}" for what, said in told.items() if said]


def describe_offload(report: Report, candidate: Candidate) -> list[str]:
    """Returns lines on offload: GB that a step moves, the tokens from which on that is hidden, and writes to disks."""
    if not candidate.away:
        return []
    moved = step_bytes(candidate.layout, 0, candidate.recipe.train.gradient_accumulation_steps)
    said = ", ".join(f"{what.replace('_', ' ')} {size / GB:,.1f}" for what, size in moved.items() if size)
    time, larger = candidate.time, candidate
    while larger.time.offload > 0 and larger.tokens < 1000 * candidate.tokens:  # larger micro-batches hide more
        train = larger.recipe.train
        batch = {"per_device_train_batch_size": 2 * train.per_device_train_batch_size}
        recipe = larger.recipe.model_copy(update={"train": train.model_copy(update=batch)})
        larger = report.planner.lay_out(recipe, report.cluster)
    hidden = f"{time.offload:.1f} s of {time.seconds:.1f} nothing hides"
    if time.offload > 0 and larger.time.offload == 0:
        hidden += f"; from {larger.tokens:,} tokens a step on all of it is hidden"
    lines = [f"offload  GB of a rank and step: {said}; {hidden}"]
    if written := moved["disk_written"] * report.cluster.a_node / 1e12:
        lines.append(f"disk     {written:,.2f} TB written in a node each step, {written:,.1f} PB in 1,000 steps")
    return lines


def describe_path(report: Report) -> list[str]:
    """Returns a line where the advice uses a disk whose directory the user has to name, else nothing."""
    best, named = report.advice.best, report.planner.recipe.offload.path
    if named or best is None or not best.recipe.offload.path:
        return []
    return [f"offload.path = {DISK!r} stands for a directory on a local disk of each node: set it before the run"]


def describe_advice(report: Report) -> list[str]:
    """Returns the advice in lines, with the overrides that set it."""
    best = report.advice.best
    if best is None:
        return [f"advice   {report.advice.why}"]
    shown = {key: fact.text for key, fact in facts(report.planner, best).items()}
    said = f"{shown['peak_bytes']} GB, {shown['step_seconds']} s a step, MFU {shown['mfu']}"
    hours = f"{shown['gpu_hours_per_billion_tokens']} GPU-hours for a billion tokens"
    words = " ".join(f"{key}={str(value).replace(' ', '')}" for key, value in _settings(report, best).items())
    return [
        f"advice   {best.words()}: {said}, {hours}",
        f"because  {report.advice.why}",
        *describe_offload(report, best),
        f"set      {words}",
        *(f"first    {line}" for line in describe_path(report)),
    ]
