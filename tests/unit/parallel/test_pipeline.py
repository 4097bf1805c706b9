"""Pipeline parallel without ranks: what is refused, who has which layers and rows, and what a part is of the whole."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from plans import settings
from tiny import config, said_by, write_recipe

from shardbook.axes import CP, DATA_AXES, DP_REPLICATE, DP_SHARD, PP, PP_BACKWARD, PP_ENDS, PP_FORWARD, TP
from shardbook.model.causal_lm import build_model
from shardbook.model.flops import count_flops
from shardbook.model.weights import student_parameters
from shardbook.optim import build_optimizer
from shardbook.parallel import placement
from shardbook.parallel.layout import Layout
from shardbook.parallel.mesh import DataRank, resolve_sizes
from shardbook.parallel.pipeline import build_pipeline_links
from shardbook.parallel.placement import World, build_local
from shardbook.parallel.schedule import Pipeline, layers_per_pp_stage
from shardbook.parallel.units import place_whole
from shardbook.recipe import STAGES, Optim, Parallel, load_recipe, resolve_precision

TWO, LOOPED = "parallel.pp_size=2", "parallel.pipeline_schedule=interleaved"
ALONE, SWITCH = ["there is no pipeline", "set parallel.pp_size"], ["a switch of ZeRO++", "leave parallel.quantize"]
REFUSED = {  # a recipe's words, and what the error says
    "chunks alone": (["parallel.pipeline_chunks=2", LOOPED], ["parallel.pipeline_chunks = 2", *ALONE]),
    "gpipe alone": (["parallel.pipeline_schedule=gpipe"], ["parallel.pipeline_schedule = 'gpipe'", *ALONE]),
    "interleaved alone": ([LOOPED], ["parallel.pipeline_schedule = 'interleaved'", *ALONE]),
    "none": (["parallel.pp_size=0"], ["parallel.pp_size = 0", "greater than or equal to 1"]),
    "no chunks": ([TWO, "parallel.pipeline_chunks=0"], ["parallel.pipeline_chunks = 0", "greater than or equal to 1"]),
    "unknown": ([TWO, "parallel.pipeline_schedule=zbv"], ["parallel.pipeline_schedule = 'zbv'", "'1f1b'"]),
    "zeropp": ([TWO, "parallel.stage=zeropp"], ["parallel.stage = 'zeropp'", "set parallel.stage=zero3"]),
    "qwZ": ([TWO, "parallel.stage=hsdp", "parallel.quantize_weights=8"], SWITCH),
    "qgZ": ([TWO, "parallel.quantize_gradients=[8, 4]"], SWITCH),
    "hpZ": ([TWO, "parallel.stage=hsdp", "parallel.secondary_shard=2"], SWITCH),
    "inputs away": (
        [TWO, "offload.activations=cpu", "activation.checkpointing=full"],
        ["offload.activations = 'cpu'", "leave [offload] out"],
    ),
    "one chunk": ([TWO, LOOPED], ["parallel.pipeline_chunks = 1", "set parallel.pipeline_chunks=2"]),
    "not looped": (
        [TWO, "parallel.pipeline_chunks=2"],
        ["parallel.pipeline_schedule = '1f1b'", "set parallel.pipeline_schedule=interleaved"],
    ),
    "micros": (
        ["parallel.pp_size=4", LOOPED, "parallel.pipeline_chunks=2", "train.gradient_accumulation_steps=6"],
        ["parallel.pp_size = 4", "train.gradient_accumulation_steps = 6", "must be a multiple of 4"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_compose_is_refused_in_one_line(name, tiny, tmp_path):
    words, parts = REFUSED[name]
    said = said_by(load_recipe, write_recipe(tiny, tmp_path), words)
    assert "parallel.p" in said and all(part in said for part in parts), said


def test_a_world_that_it_does_not_divide_is_refused():
    said = said_by(resolve_sizes, Parallel(pp_size=2), (DP_SHARD,), 3)
    assert "parallel.pp_size = 2: 2 does not divide the world of 3 ranks" in said
    said = said_by(resolve_sizes, Parallel(pp_size=2, tp_size=2), (DP_SHARD,), 6)
    assert "parallel.pp_size = 2, parallel.tp_size = 2: 4 does not divide the world of 6 ranks" in said
    said = said_by(resolve_sizes, Parallel(pp_size=2, dp_shard_size=2), (DP_SHARD,), 2)
    assert "pp 2 x dp_replicate 1 x dp_shard 2 needs 4 ranks, the world has 2" in said


def parallel_of(ranks: int, chunks: int = 1, **more) -> Parallel:
    interleaved = {"pipeline_schedule": "interleaved", "pipeline_chunks": chunks} if chunks > 1 else {}
    return Parallel(pp_size=ranks, **interleaved, **more)


def part_of(parallel: Parallel, rank: int, world: int, **facts):
    """The model as the global `rank` has it."""
    recipe = resolve_precision(
        settings(parallel=parallel, train={"steps": 1, "gradient_accumulation_steps": parallel.pp_size}), "cpu"
    )
    return build_local(recipe, config(**facts), rank=rank, world_size=world)


@pytest.mark.parametrize(
    ("ranks", "chunks", "said"),
    [
        (4, 1, "parallel.pp_size = 4: 4 stages of a model that has 3 blocks; there may be 3 at most; set it lower"),
        (
            2,
            2,
            "parallel.pp_size = 2, parallel.pipeline_chunks = 2: 4 stages of a model that has 3 blocks; "
            "there may be 3 at most; set one of them lower",
        ),
    ],
)
def test_more_stages_than_blocks_are_refused_on_each_rank(ranks, chunks, said):
    for rank in range(ranks):
        assert said_by(part_of, parallel_of(ranks, chunks), rank, ranks) == said


def test_layers_are_dealt_out_evenly_and_the_last_stage_has_more_last():
    assert [layers_per_pp_stage(layers, 3) for layers in (3, 4, 5, 6)] == [(1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2)]
    assert layers_per_pp_stage(126, 16) == (7, *[8] * 14, 7)  # Llama 3 405B
    for stages in range(1, 9):
        for layers in range(stages, 40):
            dealt = layers_per_pp_stage(layers, stages)
            assert sum(dealt) == layers and len(dealt) == stages and max(dealt) - min(dealt) <= 1
            assert dealt[-1] == min(dealt) and dealt[0] <= min(dealt[1:-1], default=layers)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_layer_is_one_ranks(ranks, chunks):
    for layers in range(ranks * chunks, 30):
        dealt = layers_per_pp_stage(layers, ranks * chunks)
        places = [Pipeline("interleaved", rank, ranks, dealt) for rank in range(ranks)]
        assert {place.chunks for place in places} == {chunks}
        # one chunk of every rank after another is the model, in order
        order = [number for chunk in range(chunks) for place in places for number in place.own_layers(chunk, layers)]
        assert order == list(range(layers))
        ends = [(place.is_first(chunk), place.is_last(chunk)) for chunk in range(chunks) for place in places]
        assert ends == [(stage == 0, stage == ranks * chunks - 1) for stage in range(ranks * chunks)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("ranks", "chunks", "tp_size"), [(2, 1, 1), (3, 1, 1), (7, 1, 1), (2, 3, 1), (3, 2, 2), (2, 1, 4)]
)
def test_names_shapes_and_work_are_those_of_the_whole(ranks, chunks, tp_size, tied):
    facts = {"num_hidden_layers": 7, "tied": tied}
    whole, world = build_model(config(**facts), "fp32"), ranks * tp_size
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    times = dict.fromkeys(shapes, 0)
    for rank in range(world):
        local = part_of(parallel_of(ranks, chunks, tp_size=tp_size), rank, world, **facts)
        part = local.model
        assert [(name, each.shape) for name, each in local.placements.items()] == list(shapes.items())
        assert local.flops == count_flops(whole)
        assert [name in part.state_dict() for name in ("model.norm.weight", "lm_head.weight")] == [part.has_head] * 2
        own = [name for name, _ in student_parameters(part)]
        assert own == [name for name in shapes if name in own]  # in the whole model's order
        for name in own:
            times[name] += 1
        runs = [block for chunk in local.chunks for block in chunk.blocks]
        assert sorted(map(id, runs)) == sorted(map(id, part.blocks)), "blocks of chunks are those of the rank"
    twice = {"model.embed_tokens.weight": 2 * tp_size} if tied else {}  # at either end
    assert times == dict.fromkeys(shapes, tp_size) | twice


@pytest.mark.parametrize("tied", [True, False])
def test_bf16_moments_round_by_the_number_in_the_whole_model(tied):
    """So copies of a tied weight stay the same."""

    def numbers(model, placements):
        shapes = {name: each.shape for name, each in placements.items()}
        optimizer = build_optimizer(model, Optim(name="adamw_bf16", learning_rate=1e-3), 0, shapes)
        names = {parameter: name for name, parameter in model.named_parameters()}
        ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        return dict(zip(ordered, optimizer.numbers, strict=True))

    facts = {"num_hidden_layers": 7, "tied": tied}
    model = build_model(config(**facts), "fp32")
    whole = numbers(model, place_whole(model))
    assert list(whole.values()) == list(range(len(whole)))
    locals_ = [part_of(parallel_of(2, 2), rank, 2, **facts) for rank in range(2)]
    parts = [numbers(local.model, local.placements) for local in locals_]
    assert all(part[name] == whole[name] for part in parts for name in part) and parts[0] | parts[1] == whole


def layout_of(stage: str, rank: int, world: int, layers: int = 4, **sizes) -> Layout:
    recipe = resolve_precision(
        settings(
            parallel=Parallel(stage=stage, **sizes),
            train={"steps": 1, "gradient_accumulation_steps": sizes.get("pp_size", 1)},
        ),
        "cpu",
    )
    local = build_local(recipe, config(num_hidden_layers=layers), rank=rank, world_size=world)
    return placement.layout_of(recipe, local, World(world, world))


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "zeropp"])
def test_who_sees_which_rows_and_talks_to_whom(stage):
    """Ranks of a stage of the model are neighbours, and all of them see what those of the next see."""
    more = {"dp_replicate_size": 2, "dp_shard_size": 1} if stage == "hsdp" else {}
    for rank in range(16):
        layout = layout_of(stage, rank, 16, pp_size=2, cp_size=2, tp_size=2, **more)
        assert list(layout.mesh) == [PP, *DATA_AXES, CP, TP] and layout.mesh[PP] == 2
        assert list(layout.sizes) == [PP, *DATA_AXES, TP] and layout.world_size == 16
        place = rank % 8
        assert layout.data_rank(rank) == DataRank(place // 4, 2, 2, place // 2 % 2, 2, 2), rank
        groups = layout.groups(rank)
        assert groups[PP] == groups[PP_ENDS] == [place, place + 8]
        assert groups[PP_FORWARD] == groups[PP_BACKWARD] == [rank, (rank + 8) % 16]
        shared = {axis: groups[axis] for axis in (*DATA_AXES, CP, TP)}
        assert all(other // 8 == rank // 8 for group in shared.values() for other in group), "of one stage of the model"


def test_neighbours_of_a_middle_stage():
    layout = layout_of("hsdp", 5, 12, pp_size=3, dp_shard_size=2)
    assert layout.mesh == {PP: 3, DP_REPLICATE: 2, DP_SHARD: 2}
    groups = layout.groups(5)
    assert (groups[PP], groups[PP_ENDS]) == ([1, 5, 9], [1, 9])
    assert (groups[PP_FORWARD], groups[PP_BACKWARD]) == ([5, 9], [5, 1])
    assert layout.blocks(4) == [1, 2] and layout.data_rank(5) == DataRank(1, 4, 1, 0, 1, 3)


def test_chunks_have_units_of_their_own():
    """A block each, a root that has nothing itself, and what is at the model's ends."""
    for rank, units in ((0, (3, 2)), (1, (2, 3))):
        layout = layout_of("zero3", 2 * rank, 4, pp_size=2, pipeline_schedule="interleaved", pipeline_chunks=2)
        assert layout.chunk_units == units and tuple(len(chunk.units) for chunk in layout.chunks) == units
        assert not any(chunk.units[-1].shapes for chunk in layout.chunks)
        assert layout.blocks(4) == [rank, rank + 2]


def test_nothing_is_split_off_one_rank():
    local = part_of(Parallel(), 0, 4)
    assert local.chunks == [local.model] and local.pipeline == Pipeline()
    assert local.model.has_embedding and local.model.has_head


def test_a_knob_that_does_nothing_to_blocks_every_rank_refuses():
    """And what does nothing on some ranks alone, none does: the others would wait for it."""
    most = max(unit.numel for unit in layout_of("zero3", 1, 4, pp_size=4).units)
    for rank in range(4):
        assert layout_of("zero3", rank, 4, pp_size=4, forward_prefetch=1).parallel.forward_prefetch == 1
        said = said_by(layout_of, "zero3", rank, 4, pp_size=4, reshard_min_params=most + 1)
        assert "nothing would be freed (the largest of 1 units" in said


def links_of(monkeypatch, rank, world, **sizes):
    """The links of a rank, and what it waits for on the host while they are built, in order: messages by (source,
    target, group), as NCCL, which connects two ranks at their first one, waits for both ends."""
    waits = []
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "new_group", lambda ranks, group_desc: (*sorted(ranks), group_desc))
    monkeypatch.setattr(dist, "send", lambda tensor, to, group: waits.append((rank, to, group)))
    monkeypatch.setattr(dist, "recv", lambda tensor, by, group: waits.append((by, rank, group)))
    mesh = SimpleNamespace(device_type="cpu", get_group=lambda axis: axis)
    layout = layout_of("zero3", rank, world, layers=8 * sizes.get("pipeline_chunks", 1), **sizes)
    model = SimpleNamespace(config=config(), named_parameters=list)
    return build_pipeline_links(model, layout, mesh), waits


def never_done(waits):
    """What is left of each rank's `waits` where a message passes once both of its ranks have come to it."""
    left = {rank: list(each) for rank, each in waits.items()}
    while passing := [each[0] for each in left.values() if each and left[each[0][0]][:1] == left[each[0][1]][:1]]:
        for each in left.values():
            if each and each[0] in passing:
                each.pop(0)
    return [message for each in left.values() for message in each]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_each_link_is_connected_by_a_message_before_a_step(ranks, chunks, monkeypatch):
    """Each passes one, the way that its messages will go, and nobody waits in a ring: two columns of ranks."""
    interleaved = {"pipeline_schedule": "interleaved", "pipeline_chunks": chunks} if chunks > 1 else {}
    waits = {}
    for rank in range(2 * ranks):
        links, waits[rank] = links_of(monkeypatch, rank, 2 * ranks, pp_size=ranks, **interleaved)
        sends = {(rank, other, group) for other, group in links.to.values()}
        assert len(waits[rank]) == len(set(waits[rank]))
        assert set(waits[rank]) == sends | {(other, rank, group) for other, group in links.by.values()}
    assert not never_done(waits)
    # planted bug: whoever sends does so first, then waits for what comes
    first_to_send = {rank: sorted(each, key=lambda message: message[0] != rank) for rank, each in waits.items()}
    assert never_done(first_to_send)
