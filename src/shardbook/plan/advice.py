"""The advice of a plan: the fastest of the candidates that fit, and the reasons against the others.

Invariant: an estimate decides between candidates, so other tp, cp, pp or ep sizes than the recipe's are advised only
where they gain more than the estimate may err, or nothing else fits: the traffic of tp, cp and ep delays every block.
"""

from dataclasses import dataclass
from typing import Any

from shardbook.gpus import GPUS
from shardbook.plan.cluster import Candidate, Planner, build_planner
from shardbook.plan.hardware import Cluster
from shardbook.recipe import TIERS, conflicts, with_settings

AGAIN = {"none": 0.0, "selective": 0.05, "full": 0.25}  # greatest share of a step's time that recompute takes
GAIN = 0.9  # other tp, cp, pp or ep must get below this share of a step's time: the estimate is no better
WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# settings with which few of the weights are trained
ADAPTERS: dict[str, dict[str, Any]] = {"LoRA": {"lora.r": 16}, "QLoRA": {"lora.r": 16, "model.load_in_4bit": True}}


@dataclass(frozen=True)
class Advice:
    """The fastest candidate that fits, and the reasons against the others."""

    best: Candidate | None
    why: str
    refused: list[tuple[Candidate, str]]  # the smallest of each stage that never fits, and what it lacks


def advise(planner: Planner, cluster: Cluster) -> Advice:
    """Returns the fastest candidate that fits the cluster; ties go to the simpler stage, which stands first."""
    is_fixed = planner.recipe.offload.optimizer != "none"  # a recipe with offload names its tiers
    everything, best = list[Candidate](), None
    for tier in TIERS[:1] if is_fixed else TIERS:  # each slower than the one before
        everything += planner.candidates(cluster, tier)
        best = _fastest(everything)
        if tier == "none" and _may_gain(planner, cluster, best):
            others = _sharing(planner, cluster, is_ep_only=best is not None and not _waits_for_nodes(cluster, best))
            everything += others
            other = _fastest(others)
            if other and (best is None or other.time.seconds < GAIN * best.time.seconds):
                best = other
        if best:
            break
    if best:
        able = (
            each for each in everything if each.fits and each.time.seconds - each.time.bubble / 2 < best.time.seconds
        )
        best = _fastest([best, *filter(None, map(planner.interleaved, able))])
    refused = []
    if best:  # stages are judged by candidates with the best one's tp, cp, pp and ep sizes
        everything = [each for each in everything if each.layout.shared == best.layout.shared]
    for name in dict.fromkeys(candidate.layout.stage.name for candidate in everything):
        of_stage = [candidate for candidate in everything if candidate.layout.stage.name == name]
        if not any(candidate.fits for candidate in of_stage):
            least = min(of_stage, key=lambda candidate: candidate.peak.total)
            over = ", ".join(f"most {what}; {count:,.1f} GB over" for what, count in least.over_budget_gb.items())
            refused.append((least, over))
    if best is None:
        return Advice(None, _where_it_fits(planner, cluster, everything), refused)
    return Advice(best, _reason(best, refused, cluster), refused)


def min_gpus(planner: Planner, stage: str, cluster: Cluster, checkpointing: str = "") -> int | None:
    """Returns the fewest GPUs on which the recipe's micro-batch fits under `stage`, with its own checkpointing or the
    one that is given; None: not up to 4,096."""
    for world in WORLDS:
        smaller = cluster.resized(world)
        recipe = planner.under(stage, smaller)
        if recipe and checkpointing:
            recipe = with_settings(recipe, {"activation.checkpointing": checkpointing})
        if recipe and not conflicts(recipe) and planner.lay_out(recipe, smaller).fits:
            return world
    return None


def fit_adapters(planner: Planner, cluster: Cluster) -> dict[str, Candidate | None]:
    """Returns for each of ADAPTERS that goes with the recipe its fastest candidate that fits, None where none does."""
    adapted: dict[str, Candidate | None] = {}
    for name, settings in ADAPTERS.items():
        recipe = with_settings(planner.recipe, settings)
        if not conflicts(recipe):
            like = build_planner(recipe, planner.document_tokens, planner.expert_load)
            adapted[name] = _fastest(list(like.candidates(cluster)))
    return adapted


def _sharing(planner: Planner, cluster: Cluster, is_ep_only: bool) -> list[Candidate]:
    """Returns candidates with another tp, cp, pp or ep size, or `is_ep_only`; where none of them fits, with two of tp,
    cp and pp."""
    candidates, asked = list[Candidate](), planner.recipe.parallel
    for both in (False,) if is_ep_only else (False, True):
        for sizes in planner.parallel_sizes(cluster, both):
            if sizes[3] != asked.ep_size or not is_ep_only:
                candidates += planner.candidates(cluster, sizes=sizes)
        if _fastest(candidates):
            break
    return candidates


def _fastest(candidates: list[Candidate]) -> Candidate | None:
    fitting = (candidate for candidate in candidates if candidate.fits)
    return min(fitting, key=lambda candidate: candidate.time.seconds, default=None)


def _may_gain(planner: Planner, cluster: Cluster, best: Candidate | None) -> bool:
    """Returns whether other sizes could save 1 - GAIN of the time of `best`, or fit where nothing does. Nothing hides
    their collectives: only waits for nodes or pipeline stages, or for gathers of experts, can be saved, and recompute
    beside them."""
    if best is None:
        return True
    waits = best.time.exposed + best.time.bubble
    most = waits / best.time.seconds + AGAIN[best.recipe.activation.checkpointing]
    return (_waits_for_nodes(cluster, best) or planner.has_experts) and most > 1 - GAIN


def _waits_for_nodes(cluster: Cluster, best: Candidate) -> bool:
    """Returns whether other nodes or pipeline stages are what `best` may wait for."""
    return cluster.nodes > 1 or best.time.bubble > 0


def _reason(best: Candidate, refused: list[tuple[Candidate, str]], cluster: Cluster) -> str:
    left = (cluster.room_bytes - best.peak.total) / 1e9
    because = f"{best.layout.stage.name}: {left:.1f} GB of {cluster.room_bytes / 1e9:.0f} to spare; "
    beside = "".join(f" with {axis} {size}" for axis, size in best.layout.shared.items() if size > 1)
    others = ", ".join(f"{candidate.layout.stage.name}{beside} does not fit ({why})" for candidate, why in refused)
    waits = f"{best.time.exposed / best.time.seconds:.0%} of the step waits for the network"
    waits += f", {best.time.bubble / best.time.seconds:.0%} for other stages" * (best.time.bubble > 0)
    return because + (f"{others}; " if others else "") + waits


def _where_it_fits(planner: Planner, cluster: Cluster, everything: list[Candidate]) -> str:
    least = min(everything, key=lambda candidate: candidate.peak.total)
    for world in (size for size in WORLDS if size > cluster.gpus):
        larger = cluster.resized(world)
        if any(candidate.fits for candidate in planner.candidates(larger)):
            return f"fits nowhere here; the smallest cluster of these GPUs where it does has {world}"
    larger_gpus = [name for name, gpu in GPUS.items() if gpu.gb > cluster.gpu.gb]
    reason = f"fits on no number of these GPUs ({least.bottleneck} is the largest term): "
    return (
        reason + f"larger GPUs ({', '.join(larger_gpus)}), or " * bool(larger_gpus) + "shorter rows (data.max_length)"
    )
