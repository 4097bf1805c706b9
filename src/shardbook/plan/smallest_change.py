"""The change of one thing that makes a step fit: the cheapest in time is tried first."""

from collections.abc import Iterator
from dataclasses import replace

from transformers import PreTrainedConfig

from shardbook.arithmetic import ceil_div
from shardbook.axes import DATA_AXES, DP_SHARD
from shardbook.parallel.layout import Layout
from shardbook.plan.cluster import KINDS
from shardbook.plan.peak import predict_fullest
from shardbook.recipe import Generate, Recipe, conflicts, find_stage, with_settings

NONE_FITS = "no single change would fit; shardbook plan also tries parallel.tp_size, cp_size, pp_size and ep_size"


def smallest_change(
    layout: Layout, config: PreTrainedConfig, recipe: Recipe, room: float, has_more: bool = True
) -> str:
    """Returns in words the change of one thing that brings the peak to at most `room` bytes: the first that is enough,
    from the cheapest in time on. Empty where none is. `has_more`: more ranks would have more memory."""
    for words, changed_layout, changed in _changes(layout, recipe, has_more):
        if not conflicts(changed) and predict_fullest(changed_layout, config, changed).total <= room:
            return words
    return ""


def _changes(layout: Layout, recipe: Recipe, has_more: bool) -> Iterator[tuple[str, Layout, Recipe]]:
    if recipe.generate.steps:
        yield "generate.steps=0", layout, recipe.model_copy(update={"generate": Generate()})
    batch, steps = recipe.train.per_device_train_batch_size, recipe.train.gradient_accumulation_steps
    while batch > 1:
        batch, steps = ceil_div(batch, 2), steps * 2
        keys = {"train.per_device_train_batch_size": batch, "train.gradient_accumulation_steps": steps}
        words = " ".join(f"{key}={value}" for key, value in keys.items())
        yield words, layout, with_settings(recipe, keys)
    now = recipe.activation.checkpointing
    for kind in KINDS[KINDS.index(now) + 1 if now in KINDS else 1 :]:
        yield f"activation.checkpointing={kind}", layout, with_settings(recipe, {"activation.checkpointing": kind})
    data_ranks = layout.replicas * layout.shards
    if not layout.stage.reshard_after_forward and data_ranks > 1:
        units = tuple(
            replace(unit, reshard_after_backward=True, reshard_after_forward=not unit.is_root_like)
            for unit in layout.units
        )
        sizes = layout.sizes | dict.fromkeys(DATA_AXES, 1) | {DP_SHARD: data_ranks}
        yield "parallel.stage=zero3", replace(layout, stage=find_stage("zero3"), sizes=sizes, units=units), recipe
    for times in (2, 4, 8) if layout.stage.shards and has_more else ():
        sizes = layout.sizes | {DP_SHARD: layout.shards * times}
        yield f"{layout.world_size * times} ranks", replace(layout, sizes=sizes), recipe
