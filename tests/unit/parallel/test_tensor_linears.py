"""Tensor-parallel linears without ranks: what a rank has of an adapter and of four bits, and what is refused."""

import pytest
import torch
from plans import settings
from tiny import config, said_by

from shardbook.model.nf4 import fill_rows, unpack_nf4
from shardbook.parallel.placement import build_local
from shardbook.parallel.tensor_linears import ShardedPackedLinear
from shardbook.recipe import Parallel, resolve_precision

WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
SIX = {"hidden_size": 192, "head_dim": 32, "num_attention_heads": 6, "intermediate_size": 256}
FOUR, NESTED = {"load_in_4bit": True}, {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}


def placed(facts, size, rank, four=(), **lora):
    sections = {"parallel": Parallel(tp_size=size), "model": dict(four), "lora": {"r": 3} | lora}
    return build_local(resolve_precision(settings(**sections), "cpu"), config(**facts), rank=rank, world_size=size)


def test_an_adapter_is_split_as_its_base_is_and_its_rank_never():
    for rank in range(2):
        local = placed({}, 2, rank)  # 32 wide, 48 inside the MLP; two heads of keys, of 8
        shapes = {name.partition(".layers.0.")[2]: tuple(p.shape) for name, p in local.model.named_parameters()}
        placements = {name.partition(".layers.0.")[2]: each for name, each in local.placements.items()}
        for name, low, high in (
            ("self_attn.q_proj", (3, 32), (16, 3)),
            ("self_attn.k_proj", (3, 32), (8, 3)),
            ("self_attn.o_proj", (3, 16), (32, 3)),
            ("mlp.up_proj", (3, 32), (24, 3)),
            ("mlp.down_proj", (3, 24), (32, 3)),
        ):
            names = [f"{name}.{part}.weight" for part in ("lora_A", "lora_B")]
            assert [shapes[each] for each in names] == [low, high]
            is_row = name.endswith(("o_proj", "down_proj"))
            assert [placements[each].tp_dim for each in names] == ([1, None] if is_row else [None, 0])


@pytest.mark.parametrize("four", [FOUR, NESTED])
def test_a_rank_has_whole_blocks_of_the_bytes_of_the_whole(four):
    """And computes with the numbers that these bytes stand for in the whole matrix."""
    full = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    whole = placed(WIDE, 1, 0, four).model.blocks[0].mlp.down_proj.to_empty(device="cpu")
    fill_rows(whole.weight_packed.data, whole.weight_absmax.data, whole.nested, full)
    want = unpack_nf4(whole.weight_packed, whole.weight_absmax, 256, whole.nested, torch.float32, False)
    for rank in range(2):
        part = placed(WIDE, 2, rank, four).model.blocks[0].mlp.down_proj.to_empty(device="cpu")
        numbers = slice(rank * 128, rank * 128 + 128)
        given = (True, full, numbers) if whole.nested else (False, full[:, numbers])
        fill_rows(part.weight_packed.data, part.weight_absmax.data, *given)
        part.local = dict(part.named_parameters(recurse=False))
        found = ShardedPackedLinear.product(part, torch.eye(128))
        assert torch.equal(found.T, want[:, numbers])


REFUSED = [
    (WIDE | {"hidden_size": 64, "head_dim": 16}, 2, "o_proj takes 64 numbers, of which a rank's share would begin at"),
    (WIDE | {"intermediate_size": 192}, 2, "down_proj takes 192 numbers"),
    (SIX, 4, "share would begin at number 32, inside a block of 64"),
]


@pytest.mark.parametrize(("facts", "size", "said"), REFUSED)
def test_a_block_of_four_bits_in_two_parts_is_refused_on_each_rank(facts, size, said):
    for rank in range(size):
        line = said_by(placed, facts, size, rank, FOUR)
        assert line.startswith(f"parallel.tp_size = {size} and model.load_in_4bit = true: ") and said in line, line


def test_norms_of_rows_that_ranks_share_are_refused():
    line = said_by(placed, WIDE, 2, 0, use_dora=True)
    assert line.startswith("parallel.tp_size = 2 and lora.use_dora = true: the norm of a row of down_proj"), line
    placed(WIDE, 2, 0, use_dora=True, target_modules=["q_proj", "up_proj"])
