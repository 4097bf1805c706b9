"""The planner on a cluster: what each layout sends and takes, which are tried, and figures that others measured."""

from dataclasses import replace
from math import comb

import pytest
from plans import plan_of

from shardbook.memory.host_state import offloaded_bytes
from shardbook.plan.activation_bytes import count_activation_bytes
from shardbook.plan.cluster import build_planner
from shardbook.plan.formulas import predict_gathered_peak
from shardbook.plan.hardware import (
    HOST_ROOM,
    INSIDE,
    PRODUCTS,
    build_cluster,
)
from shardbook.plan.speed import (
    inside_seconds,
)
from shardbook.recipe import Recipe, find_recipe, load_recipe, with_settings


def test_units_chosen_once_are_those_of_each_layout():
    """A planner chooses units once for layouts that have the same: each is as one that is made alone."""
    recipe, cluster = plan_of("smollm2-135m"), build_cluster("h100", 8)
    planner = build_planner(recipe)

    def units_of(planner, words):
        layout = planner.layout_of(with_settings(recipe, words), cluster, 0)
        return [replace(unit, modules=(), shapes=tuple(map(tuple, unit.shapes))) for unit in layout.units]

    seen = []
    for key, value in (
        ("stage", "zero3"),
        ("stage", "zero2"),
        ("reshard_min_params", 10**7),
        ("pp_size", 2),
    ):
        once, alone = (units_of(each, {f"parallel.{key}": value}) for each in (planner, build_planner(recipe)))
        assert list(map(vars, once)) == list(map(vars, alone)), key
        seen.append(str(list(map(vars, once))))
    assert len(set(seen)) == len(seen)


def test_a_base_in_four_bits_is_planned_with_what_a_run_takes():
    """Also under zeropp, of whose switches it has one."""
    stages = build_planner(load_recipe(find_recipe("llama70b-qlora"))).stages(build_cluster("a100-80gb", 16))
    assert "zeropp" in stages
    for candidate in stages.values():
        assert Recipe.model_validate(candidate.recipe.model_dump(exclude_unset=True)).parallel.quantize_weights == 0


def test_the_host_holds_what_the_fullest_stage_offloads():
    """Of a pipeline of 30 blocks: the first and the last stage have 7 and the embedding, those between them 8."""
    words = ("parallel.pp_size=4", "offload.optimizer=cpu", "train.gradient_accumulation_steps=8")
    planner, cluster = build_planner(plan_of("smollm2-135m", *words)), build_cluster("h100", 8)
    found = planner.lay_out(planner.recipe, cluster)
    first, second, last = (offloaded_bytes(layout, 0)["host"] for layout in found.layouts)
    assert second < first < last and found.offloaded_bytes == {"host": last}
    for size, fits in ((first, False), (last + 1, True)):
        poor = replace(cluster, host_gb=8 * size / 1e9 / HOST_ROOM)
        assert planner.lay_out(planner.recipe, poor).fits is fits


TP = ("data.max_length=8192", "parallel.tp_size=8", "activation.checkpointing=full")


def test_what_ranks_that_share_matrices_send():
    """Of a block six gathers and five reduce-scatters of all tokens, everything made again; two of each outside, and
    three fp32 numbers a trained token of each rank (notes/axes.md, section 5)."""
    cluster = build_cluster("h100", 64)
    planner = build_planner(plan_of("llama-3.1-8b", *TP))
    found = planner.lay_out(planner.recipe, cluster)
    tokens, told = 8192 * 4096 * 2, 8191 * 8 * 12
    along_shards = [unit.numel * 2 for unit in found.layout.units if unit.numel]
    outside = sum(size for size in along_shards if size > max(along_shards[1:-2]))  # gathered once in a step
    sent = found.comm
    assert sent["all_gather_bytes"] == 2 * sum(along_shards) - outside + (6 * 32 + 2) * tokens + told
    assert sent["reduce_scatter_bytes"] == 2 * sum(along_shards) + (5 * 32 + 2) * tokens
    assert found.tokens == 8 * 8192  # eight groups
    flops = planner.flops.of(found.tokens, found.tokens * 1200)
    assert found.mfu == pytest.approx(flops / found.time.seconds / 64 / cluster.gpu.flops)
    alone = build_planner(plan_of("llama-3.1-8b", *TP, "parallel.tp_size=1"))
    assert alone.flops == planner.flops
    shared, whole = found.time, alone.lay_out(alone.recipe, cluster).time
    assert (shared.products, shared.attention) == pytest.approx((whole.products / 8, whole.attention / 8), rel=1e-3)
    ring = (32 * 11 + 4) * tokens * 7 / 8 / (INSIDE * cluster.gpu.link)
    assert ring < shared.exposed < 1.6 * ring  # hops, and what waits for other nodes, beside it


@pytest.mark.parametrize(
    ("model", "gpus", "words", "measured"),
    [
        ("llama-3.1-70b", 256, ("activation.checkpointing=full", "train.per_device_train_batch_size=16"), 597),
        ("llama-3.1-8b", 64, ("activation.checkpointing=selective", "train.per_device_train_batch_size=4"), 4378),
    ],
)
def test_torchtitans_figures(model, gpus, words, measured):
    """Tokens a second of one H100, FSDP x TP 8, rows of 8,192 tokens, bf16, its collectives along tp not hidden: its
    post of June 2025, which does not say the micro-batch. Here products lose nothing by being an eighth as wide."""
    planner = build_planner(plan_of(model, *TP, *words), 8192)
    found = planner.lay_out(planner.recipe, build_cluster("h100", gpus))
    assert found.fits and 1 <= found.speed / measured < 1.35


def test_what_may_share_matrices():
    cluster = build_cluster("h100", 16)

    def tried(planner, cluster, both=False):
        sizes = planner.parallel_sizes(cluster, both)
        assert not planner.has_experts and {ep for *_, ep in sizes} == {1}
        return [tuple(each) for *each, _ in sizes]

    split = [(1, 2, 1), (1, 4, 1), (1, 8, 1)]  # rows
    layers = [(1, 1, 2)]  # of two nodes
    matrices = [(2, 1, 1), (4, 1, 1), (8, 1, 1)]
    assert tried(build_planner(plan_of("llama-3.1-8b")), cluster) == [*matrices, *split, *layers]
    own = build_planner(plan_of("llama-3.1-8b", "parallel.tp_size=4"))
    assert tried(own, cluster) == [(1, 1, 1), (2, 1, 1), (8, 1, 1), (4, 2, 1), (4, 1, 2)]
    own = build_planner(plan_of("llama-3.1-8b", "parallel.cp_size=8"))
    assert tried(own, cluster) == [(1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 8, 2)]
    own = build_planner(plan_of("llama-3.1-8b", "parallel.pp_size=2"))
    assert tried(own, cluster) == [(2, 1, 2), (4, 1, 2), (8, 1, 2), (1, 2, 2), (1, 4, 2), (1, 8, 2), (1, 1, 1)]
    assert tried(build_planner(plan_of("llama-3.1-8b", "lora.r=16")), cluster) == [*matrices, *split, *layers]
    twelve = tried(build_planner(plan_of("llama-3.1-8b")), build_cluster("h100", 12, a_node=4))
    assert twelve == [*matrices[:2], *split[:2]]  # three nodes
    assert tried(build_planner(plan_of("llama-3.1-8b")), cluster, both=True) == [(8, 2, 1), (8, 1, 2)]
    assert tried(build_planner(plan_of("smollm2-135m")), cluster, both=True) == [(8, 1, 2)]


EAGER = "train.compile=false"


def test_where_there_are_experts_ranks_may_share_them():
    """Beside the sizes of other axes those of ep that divide a node and the experts; the recipe's own is left out."""
    cluster = build_cluster("h100", 16)
    sizes = build_planner(plan_of("qwen3-30b-a3b", EAGER)).parallel_sizes(cluster)
    assert [each for each in sizes if each[3] > 1] == [(1, 1, 1, 2), (1, 1, 1, 4), (1, 1, 1, 8)]
    sizes = build_planner(plan_of("qwen3-30b-a3b", EAGER, "parallel.ep_size=4")).parallel_sizes(cluster)
    assert [each for each in sizes if each[:3] == (1, 1, 1)] == [(1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 8)]
    assert not [each for each in sizes if each[0] > 1]  # tp does not go with it


def test_experts_that_ranks_share_are_neither_gathered_nor_kept_whole():
    """Qwen3-30B-A3B, 128 experts of 768 x 2,048 in a block, 8 of them a token: with ep 8 under zero1 a rank gathers an
    eighth of them. A token goes to the ranks that have some of its 8, out and back, in forward, again, and in backward;
    beside it numbers of 8 bytes, 8 bytes for each choice, and 4 for the gradient of its weight."""
    cluster = build_cluster("h100", 8)
    words = (EAGER, "activation.checkpointing=full", "parallel.stage=zero1", "data.max_length=4096")
    one, eight = (build_planner(plan_of("qwen3-30b-a3b", *words, f"parallel.ep_size={ep}")) for ep in (1, 8))
    alone, shared = (planner.lay_out(planner.recipe, cluster) for planner in (one, eight))
    experts = 48 * 128 * 3 * 768 * 2048
    assert alone.comm["all_gather_bytes"] - shared.comm["all_gather_bytes"] == 2 * experts  # ep is the whole axis
    assert predict_gathered_peak(alone.layout) - predict_gathered_peak(shared.layout) == 2 * experts * 7 // 8
    copies = round(4096 * 8 * (1 - comb(112, 8) / comb(128, 8)))
    sent = 6 * copies * 2048 * 2 + 2 * ((128 + 8) * 8 + 4096 * 8 * 8) + 4096 * 8 * 4
    assert shared.comm["all_to_all_bytes"] == 48 * sent and "all_to_all_bytes" not in alone.comm
    assert one.flops == eight.flops and shared.time.products == pytest.approx(alone.time.products)


def test_a_rank_receives_as_many_times_the_mean_of_rows_as_it_is_asked_for():
    """Of T tokens, each to K of E experts, on ep ranks: the mean is T K choices, at worst ep T min(K, E / ep). Of a
    choice are kept its token, what gate and up make of it, their silu and product, its result, its weight, and three
    numbers of 8 bytes; of a token one. The sum of a token's results goes back, and its gradient comes; of a choice the
    gradient of its weight. A choice takes 2 FLOPs for each number of an expert, and in backward 4."""
    cluster, tokens, chosen, size, inner = build_cluster("h100", 8), 4096, 8, 2048, 768
    words = (EAGER, "activation.checkpointing=none", "parallel.stage=zero3", f"data.max_length={tokens}")

    def plan(ep_size, load=None):
        asked = plan_of("qwen3-30b-a3b", *words, f"parallel.ep_size={ep_size}")
        planner = build_planner(asked, expert_load=load) if load else build_planner(asked)
        found = planner.lay_out(planner.recipe, cluster)
        return found, count_activation_bytes(found.layout, planner.config, found.recipe).blocks[0][0].kept

    for ep_size, load, rows in ((8, 1.5, 1.5 * tokens * chosen), (8, 8.0, 8 * tokens * 8), (2, 2.0, 2 * tokens * 8)):
        (even, kept), (one, kept_one), (found, kept_found) = plan(ep_size), plan(ep_size, 1.0), plan(ep_size, load)
        assert (one.peak, one.comm, one.time, kept_one) == (even.peak, even.comm, even.time, kept)
        more = rows - tokens * chosen
        copies = round(tokens * ep_size * (1 - comb(128 - 128 // ep_size, chosen) / comb(128, chosen)))
        more_tokens = min(ep_size * tokens, round(load * copies)) - copies
        more_kept = more * (2 * (2 * size + 4 * inner) + 2 + 3 * 8) + more_tokens * 8
        assert kept_found - kept == pytest.approx(more_kept, rel=1e-5)  # copies of fewer tokens, rounded, were measured
        sent = {op: found.comm[op] - even.comm[op] for op in found.comm}
        more_sent = 48 * (more_tokens * 2 * size * 2 + more * 4)
        assert {op: count for op, count in sent.items() if count} == {"all_to_all_bytes": more_sent}
        flops = 48 * more * 3 * inner * size * 2 * 3
        assert found.time.products - even.time.products == pytest.approx(flops / (PRODUCTS * cluster.gpu.flops))
        assert found.worst_peak == even.worst_peak and found.time.memory > even.time.memory
    assert found.layout.most_expert_load == 2 and found.peak == found.worst_peak
    # fewer experts than ranks send tokens to: E / K
    crowded, _ = plan(8, 8.0)
    assert replace(crowded.layout, chosen_share=0.5).most_expert_load == 2


def test_other_sizes_of_ep_take_no_more_than_they_can():
    planner = build_planner(plan_of("qwen3-30b-a3b", EAGER, "parallel.ep_size=8"), expert_load=4.0)
    cluster, loads = build_cluster("h100", 8), {}
    for ep_size in (1, 2, 4, 8):
        recipe = with_settings(planner.recipe, {"parallel.ep_size": ep_size})
        loads[ep_size] = planner.lay_out(recipe, cluster).layout.expert_load
    assert loads == {1: 1, 2: 2, 4: 4, 8: 4}


CP = ("data.max_length=131072", "parallel.cp_size=8", "activation.checkpointing=full")


def test_what_ranks_that_split_rows_send():
    """Of a block three times queries, keys, values there and their result back, everything made again; 32 heads and 8
    of keys go round (notes/axes.md, section 5). Work is an eighth, that of attention too."""
    cluster = build_cluster("h100", 64)
    planner = build_planner(plan_of("llama-3.1-8b", *CP))
    found = planner.lay_out(planner.recipe, cluster)
    exchanged = 131072 // 8 * (2 * 32 + 2 * 8) * 128 * 2
    assert found.comm["all_to_all_bytes"] == 3 * 32 * exchanged
    assert found.tokens == 8 * 131072
    alone = build_planner(plan_of("llama-3.1-8b", *CP, "parallel.cp_size=1"))
    assert alone.flops == planner.flops
    split, whole = found, alone.lay_out(alone.recipe, cluster)
    for what in ("products", "attention"):
        assert getattr(split.time, what) == pytest.approx(getattr(whole.time, what) / 8, rel=1e-3)
    assert split.peak.activations == pytest.approx(whole.peak.activations / 8, rel=1e-6)
    flops = planner.flops.of(found.tokens, found.tokens * 1200)
    assert found.mfu == pytest.approx(flops / found.time.seconds / 64 / cluster.gpu.flops)
    ring = 3 * 32 * exchanged * 7 / 8 / (INSIDE * cluster.gpu.link)
    assert ring < inside_seconds(found.layout, planner.config, planner.recipe, cluster) < 1.6 * ring


def test_a_dense_mask_that_is_named_counts():
    """A byte for each pair of tokens of a packed row, on every rank that splits it."""
    long = ("data.max_length=32768", "parallel.cp_size=8", "activation.checkpointing=full")
    cluster, peaks = build_cluster("h100", 8), {}
    for words in ((), ("model.attention=sdpa",), ("model.attention=sdpa", "data.packing=false")):
        planner = build_planner(plan_of("llama-3.1-8b", *long, *words))
        peaks[words] = planner.lay_out(planner.recipe, cluster).peak
    none, dense, plain = peaks.values()
    assert dense.activations - none.activations >= 32768**2 and plain.total == none.total


def test_scaling_as_the_page_has_it():
    recipe = load_recipe(find_recipe("llama8b-fsdp"))
    planner = build_planner(recipe)

    def found(gpus, stage, nics=0):
        cluster = build_cluster("h100", gpus, nics)
        return planner.lay_out(planner.under(stage, cluster), cluster).time

    waits = [found(gpus, "zero3") for gpus in (8, 64, 512)]
    assert [f"{time.exposed / time.seconds:.1%}" for time in waits] == ["1.4%", "1.7%", "2.6%"]
    assert [f"{waits[0].seconds / time.seconds:.0%}" for time in waits] == ["100%", "101%", "100%"]
    slow = [waits[0].seconds / found(gpus, stage, 400).seconds for stage in ("zero3", "hsdp") for gpus in (64, 512)]
    assert [f"{share:.0%}" for share in slow] == ["55%", "48%", "64%", "59%"]
