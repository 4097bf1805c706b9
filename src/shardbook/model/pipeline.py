"""Pipeline parallel of a model: keeps the layers of this rank's pipeline stages (parallel/pipeline.py).

Invariant: the parameters that stay keep their names. Facts of the whole model are noted before the others go: shapes by
name, in order, for checkpoints, files and seeds, and its FLOPs. Applied on the meta device, after tensor and context
parallel.
"""

from collections.abc import Sequence
from itertools import chain

from shardbook.model.causal_lm import CausalLM, count_flops
from shardbook.model.hf_model import at, copy_module, put
from shardbook.parallel.schedule import Pipeline, layers_per_pp_stage
from shardbook.parallel.units import FULL_SHAPES, TP_SHARDED
from shardbook.recipe import Parallel, RecipeError


def split_stages(model: CausalLM, parallel: Parallel, rank: int, world_size: int) -> None:
    """Keeps of `model` the layers of the global `rank`. Raises RecipeError for fewer blocks than pipeline stages."""
    ranks, chunks = parallel.pp_size, parallel.pipeline_chunks
    if ranks == 1:
        return
    blocks = model.all_blocks
    if ranks * chunks > len(blocks):
        setting = f"parallel.pp_size = {ranks}" + f", parallel.pipeline_chunks = {chunks}" * (chunks > 1)
        way_out = f"there may be {len(blocks)} at most; set {'one of them' if chunks > 1 else 'it'} lower"
        raise RecipeError(f"{setting}: {ranks * chunks} stages of a model that has {len(blocks)} blocks; {way_out}")
    model.flops = count_flops(model)
    shapes = {name: getattr(each, TP_SHARDED, (0, each.shape))[1] for name, each in model.named_parameters()}
    setattr(model, FULL_SHAPES, shapes)
    place = rank * ranks // world_size
    layers = layers_per_pp_stage(len(blocks), ranks * chunks)
    pipeline = model.pipeline = Pipeline(parallel.pipeline_schedule, place, ranks, layers, model.is_tied)
    chunk_layers = [pipeline.own_layers(chunk, len(blocks)) for chunk in range(chunks)]
    keep_blocks(model, [*chain(*chunk_layers)], pipeline.is_first(0), pipeline.is_last(chunks - 1))
    if chunks > 1:
        model.chunks = [_view(model) for _ in chunk_layers]
        for chunk, view in enumerate(model.chunks):
            keep_blocks(view, chunk_layers[chunk], pipeline.is_first(chunk), pipeline.is_last(chunk))


def keep_blocks(model: CausalLM, numbers: Sequence[int], has_first_pp_stage: bool, has_last_pp_stage: bool) -> None:
    """Keeps the blocks of these `numbers`, the embedding for the first stage, norm and head for the last.
    The other blocks become None, so that no name changes. A tied head on another stage than the embedding has the
    embedding's name there."""
    names, base = model.names, model.base
    put(base, names.blocks, at(base, names.blocks).only(numbers))
    if not has_first_pp_stage:
        put(base, names.embedding, model.head if has_last_pp_stage and model.is_tied else None)
    if not has_last_pp_stage:
        put(base, names.norm, None)
        setattr(model, names.head, None)
    model.has_first_pp_stage, model.has_last_pp_stage = has_first_pp_stage, has_last_pp_stage


def _view(model: CausalLM) -> CausalLM:
    """Returns another model of the same modules, with hooks of its own."""
    view = copy_module(model)
    setattr(view, model.names.base, copy_module(model.base))
    return view
