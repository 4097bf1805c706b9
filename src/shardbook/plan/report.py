"""The report of a plan: a table for people, JSON for programs (one object with `stages` and `advice`)."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from shardbook.parallel.layout import Layout
from shardbook.parallel.placement import World, place_model
from shardbook.plan.advice import ADAPTERS, Advice, advise, fit_adapters, min_gpus
from shardbook.plan.block_traffic import describe_experts, describe_pipeline, describe_sharing, describe_splitting
from shardbook.plan.cluster import DISK, DOCUMENT_TOKENS, SIZE_KEYS, Candidate, Planner, build_planner
from shardbook.plan.formulas import Resident, paper_resident, predict_resident, step_bytes
from shardbook.plan.hardware import ACROSS, ROOM, Cluster
from shardbook.plan.peak import GB
from shardbook.recipe import Precision, Recipe, RecipeError, find_stage, with_settings
from shardbook.terminal import build_console

if TYPE_CHECKING:
    from shardbook.plan.simulate import LossTerms, Simulated

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
    min_gpus: dict[str, int | None]
    min_gpus_full: dict[str, int | None]  # with full checkpointing, of stages that fit on no number with the recipe's
    advice: Advice
    adapted: dict[str, Candidate | None]  # LoRA and QLoRA where the whole model needs a tier, or does not fit
    simulated: "Simulated | None" = None  # of the recipe's own stage


def make_report(
    recipe: Recipe,
    gpu_name: str,
    cluster: Cluster,
    document_tokens: float = DOCUMENT_TOKENS,
    terms: "LossTerms | None" = None,
    expert_load: float = 1.0,
) -> Report:
    """Returns the report of `recipe` on `cluster`, whose GPUs the user calls `gpu_name`. `terms`, an objective's: a
    step of the recipe's own stage is simulated too, here. `expert_load`: the rows that the busiest rank along ep
    receives, as a multiple of the mean. Raises RecipeError for an unknown model."""
    if document_tokens < 1:
        raise RecipeError(f"--document-tokens {document_tokens:g}: must be at least 1")
    planner = build_planner(recipe, document_tokens, expert_load)
    check_expert_load(expert_load, planner.layout_of(planner.recipe, cluster, 0))
    stages = planner.stages(cluster)
    fewest = {stage: min_gpus(planner, stage, cluster) for stage in stages}
    more = {stage: min_gpus(planner, stage, cluster, "full") for stage, count in fewest.items() if not count}
    simulated = None
    if terms:
        from shardbook.plan.simulate import simulate_step  # makes a process group, and loads torch's fake tensors

        world = World(cluster.gpus, cluster.a_node, expert_load=expert_load)
        simulated = simulate_step(place_model(planner.recipe, world, planner.config, planner.teacher), terms)
    advice = advise(planner, cluster)
    is_whole = recipe.lora.r == 0 and recipe.offload.optimizer == "none"
    needs_tier = advice.best is None or advice.best.recipe.offload.optimizer != "none"
    adapted = fit_adapters(planner, cluster) if is_whole and needs_tier else {}
    return Report(planner, recipe.precision, cluster, gpu_name, stages, fewest, more, advice, adapted, simulated)


def check_expert_load(load: float, layout: Layout) -> None:
    """Raises RecipeError where no rank along ep can receive `load` times the mean of rows."""
    most = layout.most_expert_load
    if not 1 <= load <= most:
        allowed = f"must be from 1 to {most:g}, where all tokens choose the experts of one rank"
        if most == 1:
            allowed = "no ranks share experts, so there is no busiest one; set parallel.ep_size, or leave it out"
        raise RecipeError(f"--expert-load {load:g}: {allowed}")


def show_report(report: Report, is_json: bool) -> None:
    """Prints the report on standard output."""
    if is_json:
        print(json.dumps(as_json(report), indent=1))
        return
    console = build_console()
    console.print(as_table(report))
    console.print("GB of a rank: kept, gathered, buffers, activations, work. GPUs: the fewest on which it fits")
    if any(report.min_gpus_full.values()):
        console.print("full: with activation.checkpointing=full")
    console.print("GPU-h/B: GPU-hours of a billion tokens\n")
    lines = describe_calibrated(report) + describe_simulated(report) + describe_shared(report) + describe_advice(report)
    for line in lines:
        console.print(line, markup=False)


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
        "host_gb": report.cluster.node_gb,
        "disk_gbps": report.cluster.gpu.disk / GB,
        "link_gbps": report.cluster.gpu.link / GB,
        "max_length": report.planner.recipe.data.max_length,
        "document_tokens": report.planner.document_tokens,
        "stages": [
            _row(candidate)
            | {"min_gpus": report.min_gpus[name], "min_gpus_full": report.min_gpus[name] or report.min_gpus_full[name]}
            for name, candidate in report.stages.items()
        ],
        **({"simulated": asdict(report.simulated)} if report.simulated else {}),
        "advice": {
            "fits": best is not None,
            "why": report.advice.why,
            "refused": {refused.layout.stage.name: why for refused, why in report.advice.refused},
            "adapters": {name: _row(adapted) if adapted else None for name, adapted in report.adapted.items()},
            **({"take": _row(best), "recipe": settings(best)} if best else {}),
        },
    }


def _row(candidate: Candidate) -> dict[str, Any]:
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
        **{f"{where}_bytes": size for where, size in candidate.offloaded_bytes.items()},
        **expert_facts(candidate),
        "fits": candidate.fits,
        "limit": candidate.bottleneck,
        "step": asdict(candidate.time),
        **{key: fact.value for key, fact in facts(candidate).items()},
    }


def expert_facts(candidate: Candidate) -> dict[str, Any]:
    """Returns the load of the planned rank's experts, and its peak at the greatest one; nothing without ep."""
    layout = candidate.layout
    if not layout.experts:
        return {}
    worst = {"load": layout.most_expert_load, "peak_bytes": candidate.worst_peak.total}
    return {"expert_load": layout.expert_load, "worst_expert_load": worst}


class Metric(NamedTuple):
    """A number of a candidate: its heading, its value (bytes where the unit is GB), and the unit with its format."""

    name: str
    value: float
    unit: str

    @property
    def text(self) -> str:
        return format(self.value / (GB if self.unit == "GB" else 1), FORMATS[self.unit])


def facts(candidate: Candidate) -> dict[str, Metric]:
    """Returns the numbers that the table, the page, the advice and JSON show of a candidate, by their keys in JSON."""
    peak, time = candidate.peak, candidate.time
    return {
        "kept_bytes": Metric("kept", peak.params + peak.grads + peak.optimizer, "GB"),
        "gathered_bytes": Metric("gathered", peak.gathered, "GB"),
        "buffers_bytes": Metric("buffers", peak.buffers, "GB"),
        "activations_bytes": Metric("activations", peak.activations, "GB"),
        "working_bytes": Metric("work", peak.working, "GB"),
        "peak_bytes": Metric("peak GB", peak.total, "GB"),
        "step_seconds": Metric("step s", time.seconds, "s"),
        "waiting_share": Metric("waits", time.exposed / time.seconds, "share"),
        "tokens_per_second_per_device": Metric("tok/s/GPU", candidate.speed, "tokens/s"),
        "mfu": Metric("MFU", candidate.mfu, "ratio"),
        "gpu_hours_per_billion_tokens": Metric("GPU-h/B", 1e9 / candidate.speed / 3600, "hours"),
    }


def _resident(resident: Resident) -> dict[str, float]:
    return asdict(resident) | {"total_bytes": resident.total_bytes}


def settings(candidate: Candidate) -> dict[str, Any]:
    """Returns the keys that the advice would change, as overrides."""
    recipe, train = candidate.recipe, candidate.recipe.train
    parallel, asked = recipe.parallel, candidate.planner.recipe.parallel
    shared = {key: getattr(parallel, key) for key in SIZE_KEYS if max(getattr(parallel, key), getattr(asked, key)) > 1}
    others = parallel.model_dump(exclude_defaults=True, exclude={"stage"})
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
    steps += ", compiled" * train.compile
    steps += f", expert load {report.planner.expert_load:g}" * (report.planner.expert_load > 1)
    title = f"{recipe.model.path} ({count:.2f} B) on {where}\n{cluster.node_words()}\n{steps}, {recipe.optim.name}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    headings = [fact.name for fact in facts(next(iter(report.stages.values()))).values()]
    table.add_column("stage")
    for name in (*headings, "GPUs"):
        table.add_column(name, justify="right", no_wrap=True)
    best = {"advised": report.advice.best} if report.advice.best else {}
    for name, candidate in (report.stages | best).items():
        numbers, fits = facts(candidate), candidate.fits
        largest = max(PARTS, key=lambda key, numbers=numbers: numbers[key].value)
        colours = {"peak_bytes": "green"} if fits else {"peak_bytes": "red", largest: "red"}
        cells = (Text(fact.text, style=colours.get(key, "")) for key, fact in numbers.items())
        table.add_row(name, *cells, "" if name == "advised" else min_gpus_words(report, name))
    return table


def min_gpus_words(report: Report, stage: str) -> str:
    """Returns the fewest GPUs on which the recipe fits under `stage`, or on which it does with full checkpointing."""
    full = report.min_gpus_full.get(stage)
    return str(report.min_gpus[stage] or (f"{full} full" if full else "-"))


def describe_calibrated(report: Report) -> list[str]:
    """Returns a line on the constants that measured runs changed; none where they are the usual ones."""
    cluster = report.cluster
    if (cluster.slowness, cluster.across) == (1.0, ACROSS):
        return []
    network = f"; the network gives {cluster.across:.0%} of its rate, not {ACROSS:.0%}" * (cluster.across != ACROSS)
    return [f"measured computing takes {cluster.slowness:.2f} times what data sheets' shares say{network}"]


def describe_simulated(report: Report) -> list[str]:
    """Returns a line with the peak of the simulated step beside the formula's; none where nothing was simulated."""
    if (simulated := report.simulated) is None:
        return []
    name = find_stage(report.planner.recipe.parallel.stage).name
    formula = report.stages[name].peak.total
    line = f"{name}: {simulated.peak_bytes / GB:.1f} GB at its fullest, in {simulated.moment}"
    return [f"simulated {line}; by formula {formula / GB:.1f} ({formula / simulated.peak_bytes - 1:+.0%})"]


def describe_shared(report: Report) -> list[str]:
    """Returns lines on tp, cp and pp under the recipe's own stage, and under the advice where its sizes differ."""
    of_recipe = report.stages[find_stage(report.planner.recipe.parallel.stage).name]
    best = report.advice.best
    if best and best.layout.shared != of_recipe.layout.shared:
        return [*_sharing_lines(of_recipe), *(f"{line} (advised)" for line in _sharing_lines(best))]
    return _sharing_lines(of_recipe)


def _sharing_lines(candidate: Candidate) -> list[str]:
    experts = candidate.layout, candidate.planner.config, candidate.recipe
    peaks = (candidate.peak.total, candidate.worst_peak.total) if candidate.layout.experts else None
    lines = {
        "tensor": describe_sharing(candidate.layout),
        "context": describe_splitting(candidate.layout, candidate.planner.config),
        "experts": describe_experts(*experts, peaks),
    }
    lines["pipeline"] = describe_pipeline(candidate.layout, candidate.recipe.train.gradient_accumulation_steps)
    return [f"{what:<9}{text}" for what, text in lines.items() if text]


def describe_offload(candidate: Candidate) -> list[str]:
    """Returns lines on offload: GB that a step moves, the tokens from which on that is hidden, and writes to disks."""
    if not candidate.offloaded_bytes:
        return []
    moved = step_bytes(candidate.layout, 0, candidate.recipe.train.gradient_accumulation_steps)
    parts = ", ".join(f"{what.replace('_', ' ')} {size / GB:,.1f}" for what, size in moved.items() if size)
    time, larger = candidate.time, candidate
    while larger.time.offload > 0 and larger.tokens < 1000 * candidate.tokens:  # larger micro-batches hide more
        batch = {"train.per_device_train_batch_size": 2 * larger.recipe.train.per_device_train_batch_size}
        larger = candidate.planner.lay_out(with_settings(larger.recipe, batch), candidate.cluster)
    hidden = f"{time.offload:.1f} s of {time.seconds:.1f} nothing hides"
    if time.offload > 0 and larger.time.offload == 0:
        hidden += f"; from {larger.tokens:,} tokens a step on all of it is hidden"
    lines = [f"offload  GB of a rank and step: {parts}; {hidden}"]
    if written := moved["disk_written"] * candidate.cluster.a_node / 1e12:
        lines.append(f"disk     {written:,.2f} TB written in a node each step, {written:,.1f} PB in 1,000 steps")
    return lines


def describe_path(report: Report) -> list[str]:
    """Returns a line where the advice uses a disk whose directory the user has to name, else nothing."""
    best, named = report.advice.best, report.planner.recipe.offload.path
    if named or best is None or not best.recipe.offload.path:
        return []
    return [f"offload.path = {DISK!r} stands for a directory on a local disk of each node: set it before the run"]


def describe_adapters(report: Report) -> list[str]:
    """Returns a line on LoRA and QLoRA, where all of the model fits only with a tier, or not at all; else nothing."""
    lines = []
    for name, best in report.adapted.items():
        keys = " ".join(f"{key}={str(value).lower()}" for key, value in ADAPTERS[name].items())
        shown = {key: fact.text for key, fact in facts(best).items()} if best else {}
        takes = f"{shown['peak_bytes']} GB, {shown['step_seconds']} s a step" if best else "does not fit either"
        how = f", {best.layout.stage.name}, checkpointing {best.recipe.activation.checkpointing}" if best else ""
        lines.append(f"{name} ({keys}{how}): {takes}")
    return [f"adapters {'; '.join(lines)}"] if lines else []


def describe_advice(report: Report) -> list[str]:
    """Returns the advice in lines, with the overrides that set it."""
    best = report.advice.best
    if best is None:
        return [f"advice   {report.advice.why}", *describe_adapters(report)]
    shown = {key: fact.text for key, fact in facts(best).items()}
    numbers = f"{shown['peak_bytes']} GB, {shown['step_seconds']} s a step, MFU {shown['mfu']}"
    hours = f"{shown['gpu_hours_per_billion_tokens']} GPU-hours for a billion tokens"
    words = " ".join(f"{key}={str(value).replace(' ', '')}" for key, value in settings(best).items())
    return [
        f"advice   {best.words()}: {numbers}, {hours}",
        f"because  {report.advice.why}",
        *describe_offload(best),
        *describe_adapters(report),
        f"set      {words}",
        *(f"first    {line}" for line in describe_path(report)),
    ]
