"""The parity matrix: its cases, how one is run through the whole of `train()`, and what must hold afterwards."""

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, wraps
from pathlib import Path

import reference
import torch
import torch.distributed as dist
from planted import replace
from recorded import Record
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from world import STREAMS, train_rank

RATE, DECAY, MAX_NORM = 3e-3, 0.1, 0.5
TOLERANCE = 1e-6  # of a model of three blocks in fp32 beside one in fp64
BLOCKS = 3
STEPS = 3  # of a case: each bug of bugs.py is as red after three as after five


@dataclass(frozen=True)
class Case:
    stage: str
    replicas: int
    shards: int
    micros: int = 1
    clips: bool = False
    tied: bool = True
    checkpointing: str = "none"
    extra: tuple[str, ...] = ()  # further overrides
    tp: int = 1
    model: str = ""  # its directory beside the others
    cp: int = 1
    pp: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    steps: int = STEPS

    @property
    def world(self) -> int:
        return self.pp * self.replicas * self.shards * self.cp * self.tp

    @property
    def batch(self) -> int:
        """Rows of a micro-batch."""
        return int(self.said("train.per_device_train_batch_size", 1))

    @property
    def rows(self) -> int:
        """Of a step."""
        return self.replicas * self.shards * self.micros * self.batch

    @property
    def folder(self) -> str:
        return self.model or ("model" if self.tied else "untied")

    def said(self, key: str, default):
        """The last override of a key."""
        return {word.partition("=")[0]: word.partition("=")[2] for word in self.extra}.get(key, default)

    @property
    def layout(self) -> str:
        beside = f", cp {self.cp}" * (self.cp > 1) + f", tp {self.tp}" * (self.tp > 1)
        beside += f", pp {self.pp}" * (self.pp > 1)
        return (f"{self.stage} {self.replicas}x{self.shards}" if self.stage == "hsdp" else self.stage) + beside

    @property
    def name(self) -> str:
        words = (
            self.stage,
            f"pp{self.pp}{self.schedule}{self.chunks}x" * (self.pp > 1)
            + f"{self.replicas}x{self.shards}"
            + f"xcp{self.cp}" * (self.cp > 1)
            + f"x{self.tp}" * (self.tp > 1),
            f"k{self.micros}" + f"x{self.steps}" * (self.steps != STEPS),
            "clip" if self.clips else "free",
        )
        words += (self.model or ("tied" if self.tied else "untied"), self.checkpointing, *self.extra)
        name = re.sub(r"[^\w.-]+", "_", "-".join(words))
        # a run has a name of at most 100 letters
        return name if len(name) <= 100 else f"{name[:87]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"

    def words(self, tiny: Path) -> list[str]:
        return [
            f"parallel.stage={self.stage}",
            *([f"parallel.dp_replicate_size={self.replicas}"] if self.stage in ("hsdp", "ddp") else []),
            *([f"parallel.dp_shard_size={self.shards}"] if self.stage != "ddp" else []),
            *([f"parallel.cp_size={self.cp}"] if self.cp > 1 else []),
            *([f"parallel.tp_size={self.tp}"] if self.tp > 1 else []),
            *([f"parallel.pp_size={self.pp}"] if self.pp > 1 else []),
            *([f"parallel.pipeline_schedule={self.schedule}"] if self.pp > 1 else []),
            *([f"parallel.pipeline_chunks={self.chunks}"] if self.chunks > 1 else []),
            f"model.path={tiny}/{self.folder}",
            f"train.gradient_accumulation_steps={self.micros}",
            f"optim.max_grad_norm={MAX_NORM if self.clips else 0}",
            f"activation.checkpointing={self.checkpointing}",
            f"train.steps={self.steps}",
            "train.eval_steps=2",  # train -> eval -> train, in every case
            "train.export=false",  # the weights are compared as they are
            f"run.name={self.name}",
            *self.extra,
        ]


def layouts(world: int) -> list[tuple[str, int, int]]:
    """Every stage that fits `world` ranks, as (stage, replicas, shards); hsdp with group size 1 on either axis too."""
    plain = [("ddp", world, 1), *((stage, 1, world) for stage in ("zero1", "zero2", "zero3"))]
    hybrid = [("hsdp", world // shards, shards) for shards in range(1, world + 1) if world % shards == 0]
    return plain + hybrid


MICROS, CLIPS, TIED, CHECKPOINTING = (1, 2), (False, True), (True, False), ("none", "full")
# choices of the four such that each pair of values of each two of them occurs: a covering array of strength 2
PAIRWISE = ((0, 0, 0, 0), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0))


def every_case() -> list[Case]:
    options = list(itertools.product(MICROS, CLIPS, TIED, CHECKPOINTING))
    product = [Case(*layout, *picked) for world in (1, 2, 3, 4) for layout in layouts(world) for picked in options]
    return list(dict.fromkeys([*covering_cases(), *product]))


def bitwise_cases() -> list[Case]:
    """Each stage on two ranks, with one micro-batch and with three: two sums of three may be added in another order."""
    return [Case(*layout, micros) for layout in layouts(2)[:4] for micros in (1, 3)]


def covering_cases() -> list[Case]:
    """Every layout, every pair of options in every world, and on two ranks all that must be alike to the bit; one goes
    on for five steps of three micro-batches."""
    chosen = [*bitwise_cases(), Case("zero3", 1, 3, 3, True, False, "full", steps=5)]
    for world in (1, 2, 3, 4):
        for number, layout in enumerate(layouts(world)):
            picked = PAIRWISE[(number + world) % len(PAIRWISE)]  # another for the same layout in another world
            options = zip((MICROS, CLIPS, TIED, CHECKPOINTING), picked, strict=True)
            chosen.append(Case(*layout, *(values[pick] for values, pick in options)))
    return list(dict.fromkeys(chosen))


@dataclass(frozen=True)
class Part:
    """What a rank has of a tensor; and of a DTensor where the others have theirs: the ranks of its mesh, and along each
    axis of that the dim that is cut, if one is."""

    local: Tensor
    ranks: Tensor | None = None
    cuts: tuple[int | None, ...] = ()


@dataclass
class Outcome:
    """What one rank saw of a case. `result` on rank 0 only: `outcomes_of` puts its tensors together from `parts`, those
    of each step's gradients and, last, of the weights, since to gather each in the run took a third of a case."""

    coordinates: tuple[int, ...]
    digest: str  # of this rank's own weights at the end
    uncut: str  # of those that are the same along tp
    traffic: tuple[dict, dict]  # measured, predicted
    inter_node: tuple[int, int]
    memory: tuple[dict, dict]  # kept, and moved by offload in the first step
    events: dict[str, str]  # where those of the first step part from the plan's, and from one with a mistake, by name
    result: reference.Result | None
    parts: list[dict[str, Part]]


def run_cases(recipe: Path, tiny: Path, cases: list[Case], results: Path) -> list[str]:
    """On each rank: train every case in one world; write its outcome to results/<case>.<rank>. Returns the errors."""
    from shardbook.ranks.distributed import start_distributed
    from shardbook.recipe import RecipeError, load_recipe
    from shardbook.run import prepare

    ranks, errors, real, built = start_distributed(), [], prepare.build_documents, {}

    def build_documents(data, tokenizer, *more):
        """The same data once for all cases: it was an eighth of each."""
        key = (data.model_dump_json(), tokenizer.chat_template, *more)
        if key not in built:
            built[key] = real(data, tokenizer, *more)
        return built[key]

    prepare.build_documents = build_documents
    for case in cases:
        try:
            settings = load_recipe(recipe, [*case.words(tiny), f"run.dir={results}"])
            outcome = run_case(settings, recipe, ranks, case)
            torch.save(outcome, results / f"{case.name}.{ranks.rank}")
        except RecipeError as error:  # met by every rank alike; anything else would leave the others waiting
            errors.append(f"{case.name}: {error}")
    return errors


def run_case(settings, recipe: Path, ranks, case: Case) -> Outcome:
    """`train.train` with eyes open: what passes between the story and its modules is noted, and nothing changed."""
    from shardbook import train
    from shardbook.axes import WORLD
    from shardbook.comm.ledger import Ledger, sent_between_nodes
    from shardbook.memory.host_state import offloaded_bytes
    from shardbook.optim.clip import clip_gradients
    from shardbook.parallel.sharding import apply_stage
    from shardbook.plan.formulas import predict_resident, step_bytes
    from shardbook.run.log.console import Console
    from shardbook.run.log.memory import memory_metrics

    seen, parts, record = {}, [], Record()

    def apply_seen(model, layout, mesh):
        seen.update(layout=layout, mesh=mesh, sharded=apply_stage(model, layout, mesh))
        return seen["sharded"]

    def clip_seen(parameters, max_norm):
        is_away = seen["sharded"].offloaded  # gradients are then complete with the norm, and scaled in the step
        norm = clip_gradients(parameters, max_norm) if is_away else None
        named = seen["sharded"].masters.named_parameters()
        parts.append({name: part(p.grad) for name, p in named if p.grad is not None})
        return norm if is_away else clip_gradients(parameters, max_norm)

    def measure_seen(*kept):
        metrics, away = memory_metrics(*kept), seen["sharded"].offloaded
        moved = {f"offload/{what}_bytes": count for what, count in away.moved.items()} if away else {}
        seen["memory"] = metrics | moved
        return metrics

    class SeenLedger(Ledger):
        def take_metrics(self, ranks_per_node, predicted, others):
            if self.traffic:  # whatever the machine is: as if every two ranks were a node
                seen["inter_node"] = sent_between_nodes(self.traffic, self.groups, ranks.rank, 2)
            return super().take_metrics(ranks_per_node, predicted, others)

    class SeenConsole(Console):
        def show_traffic(self, measured, predicted):
            seen["traffic"] = (dict(measured), dict(predicted))

        def print(self, text):
            pass

    spies = {apply_stage: apply_seen, clip_gradients: clip_seen, memory_metrics: measure_seen}
    spies |= {Ledger: SeenLedger, Console: SeenConsole}
    try:
        for real, spy in spies.items():
            replace(real, spy)
        with record.follow(ranks.rank):
            assert train.train(settings, recipe, ranks) == 0
    finally:
        for real, spy in spies.items():
            replace(spy, real)
    model, layout = seen["sharded"].masters, seen["layout"]
    beside = {axis: size for axis, size in (("cp", case.cp), ("tp", case.tp)) if size > 1}
    first = {"pp": case.pp} if case.pp > 1 else {}
    assert layout.mesh == first | {"dp_replicate": case.replicas, "dp_shard": case.shards} | beside
    coordinates = tuple(seen["mesh"].get_local_rank(axis) for axis in layout.sizes if axis != "pp")
    coordinates = (*coordinates, ranks.rank % layout.ep_size, ranks.rank * case.pp // case.world)
    kept = asdict(predict_resident(layout, ranks.rank, settings.optim.name))
    if settings.offload.optimizer != "none":
        kept |= {f"{where}_bytes": size for where, size in offloaded_bytes(layout, ranks.rank).items()}
    memory = {f"memory/{what}": size for what, size in kept.items()}
    memory |= {f"offload/{what}_bytes": size for what, size in step_bytes(layout, ranks.rank, case.micros).items()}
    groups = layout.groups(ranks.rank) | {WORLD: list(range(case.world))}
    inter_node = sent_between_nodes(seen["traffic"][1], groups, ranks.rank, 2)
    parts.append({name: part(p) for name, p in model.named_parameters()})
    digest, uncut = hashlib.sha256(), hashlib.sha256()
    for p in model.parameters():
        own = (p.to_local() if isinstance(p, DTensor) else p).detach().cpu().flatten().view(torch.uint8)
        digest.update(own.numpy().tobytes())
        if not (isinstance(p, DTensor) and {"tp", "ep"} & {*p.device_mesh.mesh_dim_names}):
            uncut.update(own.numpy().tobytes())
    result = None
    if ranks.is_main:
        rows = [
            json.loads(line) for line in (Path(settings.run.dir) / case.name / "metrics.jsonl").read_text().splitlines()
        ]
        rows = [row for row in rows if "train/loss" in row]
        losses, norms = [row["train/loss"] for row in rows], [row["train/grad_norm"] for row in rows]
        result = reference.Result(losses, norms, [], {})
    digests = digest.hexdigest(), uncut.hexdigest()
    traffic, bytes_kept = (seen["inter_node"], inter_node), (seen["memory"], memory)
    return Outcome(coordinates, *digests, seen["traffic"], traffic, bytes_kept, record.differences(), result, parts)


def part(tensor: Tensor) -> Part:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Part(tensor.cpu().clone())
    assert not any(placed.is_partial() for placed in tensor.placements), tensor.placements
    cuts = tuple(getattr(placed, "dim", None) for placed in tensor.placements)
    return Part(tensor.to_local().cpu().clone(), ranks_of(tensor.device_mesh), cuts)


@cache
def ranks_of(mesh) -> Tensor:
    return mesh.mesh


def joined(each: list[dict[str, Part]], stages: int) -> dict[str, Tensor]:
    """Tensors by name from the parts of each rank: as rank 0 has them, or of a pipeline's `stages` all. Then of what
    several ranks have, the same bits."""

    def join(name: str, ranks: Tensor, cuts: tuple[int | None, ...]) -> Tensor:
        """Along the last axis of the mesh first: the others cut what it has left."""
        if not cuts:
            return each[int(ranks)][name].local
        pieces = [join(name, ranks.select(-1, place), cuts[:-1]) for place in range(ranks.shape[-1])]
        return (
            torch.cat(pieces, cuts[-1]) if cuts[-1] is not None else agreed(name, pieces if stages > 1 else pieces[:1])
        )

    def agreed(name: str, tensors: list[Tensor]) -> Tensor:
        for other in tensors[1:]:
            is_same = torch.equal(tensors[0], other) or equal_bytes(tensors[0], other)
            assert is_same, f"{name} is not the same on two ranks"
        return tensors[0]

    found: dict[str, dict[int, Tensor]] = {}  # of each name by the first of the ranks that have it together
    for rank, own in enumerate(each if stages > 1 else each[:1]):
        for name, part in own.items():
            first = rank if part.ranks is None else int(part.ranks.flatten()[0])
            if first not in found.setdefault(name, {}):
                found[name][first] = part.local if part.ranks is None else join(name, part.ranks, part.cuts)
    return {name: agreed(name, list(tensors.values())) for name, tensors in found.items()}


def whole(tensor) -> Tensor:
    """A DTensor's full value, with collectives that no ledger counts."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 1:  # else torch warns of each that is cut twice
        tensor = tensor.redistribute(placements=[Replicate()] * (tensor.device_mesh.ndim - 1) + [tensor.placements[-1]])
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def rows_of_steps(
    recipe: Path, tiny: Path, rows: int, words: tuple[str, ...] = (), steps: int = STEPS
) -> list[list[reference.Row]]:
    """The rows of each of `steps` steps of `rows` rows, each a list of documents as the reference wants them."""
    from transformers import AutoTokenizer

    from shardbook.data.loader import Batching, Loader
    from shardbook.data.tokenized import build_documents
    from shardbook.recipe import load_recipe

    data = load_recipe(recipe, words).data
    documents, _ = build_documents(data, AutoTokenizer.from_pretrained(tiny / "model"), tiny / "model")
    loader = Loader(documents, Batching(data.max_length, 1, 0, 1), rows, seed=42)
    picked = [[loader.row_at(step * rows + row) for row in range(rows)] for step in range(steps)]
    encoded = documents.encoded
    return [[[(encoded[i]["input_ids"], encoded[i]["mask"]) for i in row] for row in step] for step in picked]


def documents_of_steps(
    recipe: Path, tiny: Path, rows: int, words: tuple[str, ...] = (), steps: int = STEPS
) -> list[reference.Row]:
    """The same without the rows: the documents of each step."""
    return [[document for row in step for document in row] for step in rows_of_steps(recipe, tiny, rows, words, steps)]


def reference_of(recipe: Path, tiny: Path) -> Callable[[Case], reference.Result]:
    """What the plain process makes of a case's data; stages, ranks and checkpointing make no difference to it."""

    @cache
    def train(rows: int, clips: bool, folder: str, words: tuple[str, ...], count: int) -> reference.Result:
        steps = rows_of_steps(recipe, tiny, rows, words, count)
        documents = [[document for row in step for document in row] for step in steps]
        # through seven blocks two roundings, the reference's and ours, reach the bound between them on some CPUs
        dtype = torch.float64 if folder.startswith("deep") else torch.float32
        result = reference.train(tiny / folder, documents, RATE, DECAY, MAX_NORM if clips else 0.0, dtype)
        result.rows = steps[0]
        return result

    def of(case: Case) -> reference.Result:
        words = tuple(word for word in case.extra if word.startswith("data."))
        return train(case.rows, case.clips, case.folder, words, case.steps)

    return of


def groups_of_reductions(words: list[str]) -> tuple[int, set[str]]:
    """Trains on this rank: the exit code, and the groups that reduce-scatters went through."""
    used = set()

    def name(reduce):
        @wraps(reduce)  # the ledger asks for its arguments' names
        def naming(*given, **named):
            used.add(named["group"].group_desc)
            return reduce(*given, **named)

        return naming

    for function in {"reduce_scatter_single", "reduce_scatter_tensor"} & vars(dist).keys():
        setattr(dist, function, name(getattr(dist, function)))
    return train_rank(words)[0], used


def outcomes_of(case: Case, results: Path) -> list[Outcome]:
    outcomes = [torch.load(results / f"{case.name}.{rank}", weights_only=False) for rank in range(case.world)]
    if (result := outcomes[0].result) is not None:
        *result.gradients, result.weights = (
            joined(list(each), case.pp) for each in zip(*(outcome.parts for outcome in outcomes), strict=True)
        )
    return outcomes


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


def assert_parity(got: reference.Result, want: reference.Result, tolerance: float = TOLERANCE, case: str = "") -> float:
    """Losses, norms and weights, each relative to its own size; every gradient of every step, relative to that of the
    whole model. Returns the worst.

    A gradient at the embedding has passed every block, and each has rounded it by as much: to first order the relative
    errors of a chain of products add up, so its `tolerance`, which is of BLOCKS blocks, grows in proportion to their
    number. (Seven blocks: 1.16e-6 on a CPU with AVX2 and no AVX-512, 5.5e-7 with neither.)
    """
    deep = len({name.split(".")[2] for name in want.weights if ".layers." in name})
    of_gradients, errors = max(1.0, deep / BLOCKS), {}
    for kind in ("losses", "norms"):
        pairs = zip(getattr(got, kind), getattr(want, kind), strict=True)
        errors |= {f"{kind} at step {n}": abs(a - b) / abs(b) for n, (a, b) in enumerate(pairs, start=1)}
    assert len(got.gradients) == len(want.gradients), "steps without gradients"
    for step, (ours, theirs) in enumerate(zip(got.gradients, want.gradients, strict=True), start=1):
        assert ours.keys() == theirs.keys(), f"step {step}: other parameters have gradients"
        # against the gradient of the whole model: a norm's own is some hundred times smaller, and so is its rounding
        size = torch.stack([g.norm() for g in theirs.values()]).norm()
        errors |= {
            f"gradient of {n} at step {step}": ((ours[n].view_as(theirs[n]) - theirs[n]).norm() / size).item()
            / of_gradients
            for n in theirs
        }
    errors |= {
        f"weight {n}": relative_error(got.weights[n].view_as(want.weights[n]), want.weights[n]) for n in want.weights
    }
    worst = max(errors, key=lambda key: errors[key])
    capability = torch.backends.cpu.get_cpu_capability()
    where = f" ({case}, on a CPU with {capability})" if case else f" (on a CPU with {capability})"
    assert errors[worst] < tolerance, f"{worst}: {errors[worst]:.2e} against {tolerance:.2e}{where}"
    return errors[worst]


def assert_exact_bytes(outcomes: list[Outcome]) -> None:
    """On every rank: traffic, traffic between nodes and memory measured are those predicted, to the byte."""
    for rank, outcome in enumerate(outcomes):
        for kind in ("traffic", "inter_node", "memory"):
            measured, predicted = getattr(outcome, kind)
            assert measured == predicted, f"rank {rank}, {kind}: measured {measured}, predicted {predicted}"


def assert_events(outcomes: list[Outcome]) -> None:
    """What happened in the first step on every rank is what the plan lists, event by event."""
    assert not (
        said := [f"rank {rank}, {outcome.events['']}" for rank, outcome in enumerate(outcomes) if outcome.events[""]]
    ), said


def assert_replicas_agree(outcomes: list[Outcome]) -> None:
    """Ranks with the same place along dp_shard and tp hold the same bits; along tp, of what is not cut."""
    digests, uncut = {}, {}
    for outcome in outcomes:
        assert digests.setdefault(outcome.coordinates[1:], outcome.digest) == outcome.digest, "replicas drifted apart"
        place = outcome.coordinates[1], outcome.coordinates[-1]
        assert uncut.setdefault(place, outcome.uncut) == outcome.uncut, "ranks along tp drifted apart"


def expected_traffic(
    case: Case, shapes: dict[str, torch.Size], trained: set[str], rows: list[reference.Row] | None = None
) -> dict[tuple[str, str], tuple[int, int]]:
    """The stage table in bytes, from Hugging Face's parameter names, without the code under test: fp32, a unit a
    block, tied weights and the last norm in one unit with the embedding. What is not `trained` is never summed. Of rank
    0; with tp the units have its parts, and `rows` are the first step's. Ranks along cp split one copy like others, or
    where nothing is split hold copies."""
    shapes = shapes if case.pp == 1 else stage_of(case, shapes)
    sums = {} if case.tp == 1 else tensor_traffic(case, shapes, rows, any("embed" in name for name in trained))
    replicas, n, is_away = case.replicas, case.shards, case.said("offload.optimizer", "none") != "none"
    replicas, n = (replicas * case.cp, n) if case.stage == "ddp" else (replicas, n * case.cp)
    parts = {name: part_of(name, shapes, case.tp) for name in shapes}
    units: dict[str, list[torch.Size]] = {}
    summed: dict[str, list[torch.Size]] = {}
    for name, shape in parts.items():
        unit = name.split(".")[2] if ".layers." in name else "embedding" if case.tied or "embed" in name else "head"
        units.setdefault(unit, []).append(shape)
        if name in trained:
            summed.setdefault(unit, []).append(shape)
    # embedding and head once a micro-batch: a lookup's gradient needs no weight, and what forward ends with stays
    frees = case.stage in ("zero3", "hsdp")
    gathers = {unit: 1 if not frees else case.micros * (2 if unit.isdigit() else 1) for unit in units}
    scatters = {"ddp": 0, "zero1": 1, "zero2": case.micros, "zero3": case.micros, "hsdp": case.micros}[case.stage]
    found = {}

    def padded_bytes(shapes: list[torch.Size]) -> int:
        return 4 * sum(-(-s[0] // n) * n * s[1:].numel() for s in shapes)

    sizes = {unit: padded_bytes(shapes) for unit, shapes in units.items()}
    padded = sum(padded_bytes(shapes) for shapes in summed.values())
    if n > 1:
        found["all_gather", "dp_shard"] = sum(gathers.values()), sum(gathers[unit] * sizes[unit] for unit in units)
        found["reduce_scatter", "dp_shard"] = (scatters * len(summed), scatters * padded)
        found["all_reduce", "dp_shard"] = (1, 8)  # the norm
    if replicas > 1:
        # of whole models, which are far below 25 MiB, in one; of each chunk of a pipeline's layers by itself
        is_whole = n == case.tp == 1 and not is_away
        found["all_reduce", "dp_replicate"] = (case.chunks if is_whole else len(summed), padded // n)
    if case.tp > 1:  # gradients of what is not cut, of this rank's shards; and the norm
        whole = [shape for name, shape in shapes.items() if parts[name] == shape and name in trained]
        uncut = padded_bytes(whole) // n
        is_cut = any(parts[name] != shapes[name] for name in trained & shapes.keys())
        sums_of_uncut = 1 if is_away else case.chunks
        found |= sums | {("all_reduce", "tp"): (is_cut + sums_of_uncut, uncut + 8 * is_cut)}
    if case.cp > 1:  # by the name of the whole axis, where that is all of it
        joined, size = ("dp_replicate", replicas) if case.stage == "ddp" else ("dp_shard", n)
        axis = joined if size == case.cp else "cp"
        found["all_to_all", axis] = context_traffic(case, shapes, rows)
        if case.said("method", "sft") != "sft" and case.pp == 1:  # of each answer a number; by the last stage
            calls, size = found.get(("all_reduce", axis), (0, 0))
            answers = sum(len(row) for micro in range(case.micros) for row in rows_of_first(case, rows, micro)[0])
            found["all_reduce", axis] = calls + case.micros, size + 4 * answers
    if case.pp > 1:
        embedding = parts["model.embed_tokens.weight"]
        found["all_reduce", "pp"] = 1, 8  # the norm
        if case.tied and "model.embed_tokens.weight" in trained:
            axis = "pp" if case.pp == 2 else "pp_ends"
            calls, size = found.get(("all_reduce", axis), (0, 0))
            found["all_reduce", axis] = calls + 1, size + 4 * -(-embedding[0] // n) * embedding[1]
        for micro in range(case.micros):
            _, many, length = rows_of_first(case, rows, micro)
            passed = many * length // case.cp // case.tp * embedding[1] * 4
            for axis, times in (("pp_forward", case.chunks), ("pp_backward", case.chunks - 1)):
                calls, size = found.get(("p2p", axis), (0, 0))
                if times:
                    found["p2p", axis] = calls + times, size + times * passed
    sizes = ({"pp": case.pp} if case.pp > 1 else {}) | {"dp_replicate": replicas, "dp_shard": n, "tp": case.tp}
    axis = next((axis for axis, size in sizes.items() if size == case.world), "world")
    calls, size = found.get(("all_reduce", axis), (0, 0))
    found["all_reduce", axis] = (calls + 2, size + 72)  # five counts, and four flags
    return found


def stage_of(case: Case, shapes: dict[str, torch.Size]) -> dict[str, torch.Size]:
    """What the first rank of a pipeline has: the embedding and, of each chunk, the first of its stages' blocks. Blocks
    are dealt out evenly; the second stage has one more before the first does, and the last is the last to."""
    layers, stages = len({name.split(".")[2] for name in shapes if ".layers." in name}), case.pp * case.chunks
    counts = [layers // stages] * stages
    for stage in [*range(1, stages - 1), 0, stages - 1][: layers % stages]:
        counts[stage] += 1
    own = set()
    for stage in range(0, stages, case.pp):
        own |= set(range(sum(counts[:stage]), sum(counts[: stage + 1])))
    return {
        name: shape
        for name, shape in shapes.items()
        if (int(name.split(".")[2]) in own if ".layers." in name else "embed" in name)
    }


HEAD = 8  # numbers of a head, of every tiny model


def part_of(name: str, shapes: dict[str, torch.Size], tp: int) -> torch.Size:
    """The shape of rank 0's part of a parameter: of an embedding and the head's matrix some of the vocabulary, of what
    widens some rows, of what narrows some columns; of projections none where heads do not divide."""
    if tp == 1:
        return shapes[name]
    shape, kind = list(shapes[name]), name.partition(".lora_")[0].removesuffix(".weight").split(".")[-1]
    kind = kind if "lora" in name else name.split(".")[-2]
    narrows = kind in ("o_proj", "down_proj")
    if "lora_A" in name if not narrows else "lora_B" in name:
        return torch.Size(shape)
    layer = name[: name.index("self_attn")] if "self_attn" in name else ""
    if layer:
        heads, key_heads = (shapes[f"{layer}self_attn.{each}_proj.weight"][0] // HEAD for each in "qk")
        whole = {"q_proj": heads % tp, "o_proj": heads % tp}.get(kind, heads % tp or key_heads % tp)
        if whole:
            return torch.Size(shape)
    if kind in ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        shape[0] = -(-shape[0] // tp)
    elif narrows and len(shape) == 2:
        shape[1] = -(-shape[1] // tp)
    return torch.Size(shape)


def tensor_traffic(
    case: Case, shapes: dict[str, torch.Size], rows: list[reference.Row], embedding_is_trained: bool = True
) -> dict:
    """What moves along tp in a step but for its end: tokens of every rank, [B * L, hidden] in fp32, gathered before
    attention and MLP and summed after them, in backward the other way round; the embedding's result is summed, what
    the last norm gives gathered. Of a block that runs again both gathers, and of its sums not the last. And for each
    trained token three numbers of each rank. With adapters in the first block's attention, and none before, neither its
    input nor the embedding's result has a gradient."""
    numbers = {int(name.split(".")[2]) for name in shapes if ".layers." in name}
    kind, _, every = case.checkpointing.partition(":")
    layers, again = len(numbers), 0 if kind == "none" else sum(number % int(every or 1) == 0 for number in numbers)
    outer = 2 if case.pp == 1 else 1  # of the first stage the embedding alone
    gathered, scattered = [0, 0], [0, 0]
    chunk, pairs = int(case.said("train.loss_chunk_tokens", 1024)), case.said("method", "sft") != "sft"
    for micro in range(case.micros):
        own, many, length = rows_of_first(case, rows, micro)
        trained = trained_in(own, length // case.cp)
        tokens = many * length // case.cp * shapes["model.embed_tokens.weight"][1] * 4
        # where losses have slopes of their own, logits are made again; of a score there are none
        scored = 0 if case.said("method", "sft") == "reward" else 1 + pairs
        frozen = not embedding_is_trained
        both = (gathered, 4 * layers + 2 * again + outer - frozen), (scattered, 4 * layers + again + outer - frozen)
        for total, calls in both:
            total[0] += calls
            total[1] += calls * tokens
        if case.pp == 1:
            gathered[0] += scored * math.ceil(trained / (chunk or max(1, trained)))
            gathered[1] += scored * 12 * trained * case.tp
    return {("all_gather", "tp"): tuple(gathered), ("reduce_scatter", "tp"): tuple(scattered)}


def rows_of_first(case: Case, rows: list[reference.Row], micro: int) -> tuple[list[reference.Row], int, int]:
    """Rank 0's rows of a micro-batch, each a list of documents; how many the model sees, and their length."""
    own = rows[micro * case.replicas * case.shards * case.batch :][: case.batch]
    length = int(case.said("data.max_length", 128)) * (1 + (case.said("method", "sft") != "sft"))
    if case.said("data.packing", "true") == "false":
        own = [[document] for row in own for document in row]
        length = max(len(ids) for row in own for ids, _ in row)
    multiple = math.lcm(128 if os.environ.get(STREAMS) else 64, case.tp * case.cp)  # a GPU's kernels take 128 rows
    return own, len(own), -(-length // multiple) * multiple


def trained_in(rows: list[reference.Row], length: int) -> int:
    """How many of the first `length` tokens of each row are followed by one that is trained."""
    count = 0
    for row in rows:
        follows = [trained for _, mask in row for trained in (*mask[1:], False)]
        count += sum(follows[:length])
    return count


def context_traffic(case: Case, shapes: dict[str, torch.Size], rows: list[reference.Row]) -> tuple[int, int]:
    """What moves between ranks that split rows: in a block queries, keys and values of its tokens to whoever computes
    those heads, keys and values to each that needs them, and the result back; backward the same with slopes, and what
    runs again moves again. Heads are dealt out in their order, as evenly as they go."""
    heads, key_heads = (shapes[f"model.layers.0.self_attn.{each}_proj.weight"][0] // HEAD // case.tp for each in "qk")
    dealt = [list(range(place * heads // case.cp, (place + 1) * heads // case.cp)) for place in range(case.cp)]
    needed = []
    for own in dealt:
        each = [head * key_heads // heads for head in own]
        even = len({each.count(head) for head in each}) == 1
        needed.append(len(set(each)) if even else len(each))
    numbers = {int(name.split(".")[2]) for name in shapes if ".layers." in name}
    kind, _, every = case.checkpointing.partition(":")
    layers = len(numbers)
    forwards = layers + (0 if kind == "none" else sum(number % int(every or 1) == 0 for number in numbers))
    calls = numbers = 0
    for micro in range(case.micros):
        _, many, length = rows_of_first(case, rows, micro)
        around, inside = many * length // case.cp, many * length
        given = around * (heads + 2 * sum(needed)), inside * (len(dealt[0]) + 2 * needed[0])
        taken = inside * len(dealt[0]), around * heads
        calls += 2 * (forwards + layers)
        numbers += forwards * (given[0] + taken[0]) + layers * (given[1] + taken[1])
    return calls, numbers * HEAD * 4


def assert_case(case: Case, outcomes: list[Outcome], want: reference.Result, tolerance: float = TOLERANCE) -> float:
    """Everything that must hold of a run. Returns the largest relative error."""
    worst = assert_parity(outcomes[0].result, want, tolerance, case.name)
    assert_replicas_agree(outcomes)
    assert_exact_bytes(outcomes)
    measured = {key: (volume.calls, volume.payload_bytes) for key, volume in outcomes[0].traffic[0].items()}
    shapes = {name: weight.shape for name, weight in want.weights.items()}
    expected = expected_traffic(case, shapes, set(want.gradients[0]), want.rows)
    assert measured == expected, f"traffic is not that of {case.stage}: measured {measured}, the table has {expected}"
    return worst


def same_bits(one: reference.Result, other: reference.Result) -> bool:
    """Losses, gradients and weights, to the last bit."""
    pairs = list(zip(one.gradients, other.gradients, strict=True)) + [(one.weights, other.weights)]
    return one.losses == other.losses and all(
        torch.equal(ours[name], theirs[name]) or equal_bytes(ours[name], theirs[name])
        for ours, theirs in pairs
        for name in ours
    )


def equal_bytes(one: Tensor, other: Tensor) -> bool:
    """For what is packed: as numbers its bytes may be none, which equal nothing."""
    return torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in (one, other)))
