"""Tensor parallel without ranks: what is refused, who has which heads, and the loss of a vocabulary in parts."""

import pytest
import torch
from tiny import config, said_by, write_recipe
from transformers import AutoConfig

from shardbook.model.cross_entropy import combine_parts, local_exponentials, local_grad_logits
from shardbook.parallel.mesh import resolve_sizes
from shardbook.parallel.tensor import check_tp_size, heads_of_rank
from shardbook.parallel.tensor_linears import TPGroup
from shardbook.recipe import Parallel, load_recipe

BESIDE = {  # what a recipe may not have beside tp_size = 2, and what the error says
    "dropout": (
        ["lora.r=4", "lora.lora_dropout=0.1"],
        ["lora.lora_dropout = 0.1", "other inputs of one matrix", "set lora.lora_dropout=0"],
    ),
    "zeropp": (["parallel.stage=zeropp"], ["parallel.stage = 'zeropp'", "set parallel.stage=zero3"]),
    "qwZ": (["parallel.stage=hsdp", "parallel.quantize_weights=8"], ["a switch of ZeRO++", "leave parallel.quantize"]),
    "hpZ": (["parallel.stage=hsdp", "parallel.secondary_shard=2"], ["a switch of ZeRO++", "leave parallel.quantize"]),
    "muon": (["optim.name=muon"], ["optim.name = 'muon'", "set optim.name=adamw"]),
    "length": (["data.max_length=127"], ["data.max_length = 127", "must be a multiple of 2"]),
    "none": (["parallel.tp_size=0"], ["parallel.tp_size = 0", "greater than or equal to 1"]),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_does_not_compose_is_refused_in_one_line(name, tiny, tmp_path):
    words, parts = BESIDE[name]
    said = said_by(load_recipe, write_recipe(tiny, tmp_path), ["parallel.tp_size=2", *words])
    assert "parallel.tp_size = " in said and all(part in said for part in parts), said


MODELS = [
    (config(), 5, ["the model has 4 heads", "at most"]),
    (config(intermediate_size=50), 4, ["does not divide", "intermediate_size = 50", "it may be 1, 2"]),
    (config(vocab=9), 4, ["leaves a rank without any of the 9 tokens"]),
    (config("phi3"), 2, ["family 'phi3' cannot be sharded", "colwise_gather_output", "set parallel.tp_size=1"]),
    (config("olmo2"), 2, ["family 'olmo2' cannot be sharded", "rowwise_split_input", "set parallel.tp_size=1"]),
    (AutoConfig.for_model("gpt2"), 2, ["family 'gpt2' cannot be sharded", "set parallel.tp_size=1"]),
]


@pytest.mark.parametrize(("model", "size", "parts"), MODELS, ids=lambda value: str(getattr(value, "model_type", "")))
def test_a_model_that_cannot_be_shared_so_is_refused(model, size, parts):
    said = said_by(check_tp_size, model, size)
    assert said.startswith(f"parallel.tp_size = {size}: ") and all(part in said for part in parts), said


def test_a_tied_embedding_in_the_plan_of_older_transformers_is_no_other_plan():
    """transformers 5.17 adds it to every plan of a tied model, 5.23 does not."""
    model = config()
    model.base_model_tp_plan = dict(model.base_model_tp_plan) | {"embed_tokens": "embedding_rowwise"}
    check_tp_size(model, 2)
    model.base_model_tp_plan["embed_tokens"] = "colwise"
    assert "cannot be sharded (its plan: colwise)" in said_by(check_tp_size, model, 2)


def test_a_world_that_it_does_not_divide_is_refused():
    said = said_by(resolve_sizes, Parallel(tp_size=2), ("dp_shard",), 3)
    assert "parallel.tp_size = 2: 2 does not divide the world of 3 ranks" in said
    said = said_by(resolve_sizes, Parallel(tp_size=2, dp_shard_size=2), ("dp_shard",), 2)
    assert "dp_shard 2 x tp 2 needs 4 ranks, the world has 2" in said


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (4, 1), (9, 3), (6, 3), (6, 2), (32, 8), (8, 8), (14, 2)])
def test_each_head_is_computed_once_with_the_keys_that_are_its_own(heads, key_heads):
    for size in range(1, heads + 1):
        seen = []
        for place in range(size):
            own, keys = heads_of_rank(heads, key_heads, TPGroup(size, place))
            assert len(own) in (heads // size, -(-heads // size)) and len(own) % len(keys) == 0
            groups = len(own) // len(keys)  # transformers repeats each head of keys so often
            served = [keys[number // groups] for number in range(len(own))]
            assert served == [head // (heads // key_heads) for head in own]
            seen += own
        assert seen == list(range(heads))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "spread", [1.0, 40.0, 3e4]
)  # the last overflows exp in fp32 where the largest is not taken off
def test_the_loss_of_a_vocabulary_in_parts_is_that_of_the_whole(size, spread):
    generator = torch.Generator().manual_seed(size)
    logits = spread * torch.randn(50, 37, generator=generator)
    logits[:10, :20] -= 2 * spread  # a part of which hardly anything is left
    targets = torch.arange(50) % 37
    shares = torch.log_softmax(logits.double(), -1)
    # differences of logits this large, and exponentials of them, are known to their rounding, twice: nothing is nearer
    near = 2 * torch.finfo(torch.float32).eps * max(float(logits.abs().max()), 4.0)
    want_losses = -shares.gather(1, targets[:, None])[:, 0].float()
    want_slope = (shares.exp() - torch.nn.functional.one_hot(targets, 37)).float()
    parts = [TPGroup(size, place).share(37) for place in range(size)]
    begun = [local_exponentials(logits[:, part].clone(), targets - part.start, True) for part in parts]
    told = torch.stack([torch.stack(own) for _, *own in begun])
    for part, (grad_output, *own) in zip(parts, begun, strict=True):
        losses, share = combine_parts(told, own[0])
        assert torch.allclose(losses, want_losses, rtol=0, atol=near)
        assert torch.equal(losses, combine_parts(told, begun[0][1])[0])  # the same on every rank
        got = local_grad_logits(grad_output, share, targets - part.start)
        assert torch.allclose(got, want_slope[:, part], rtol=near, atol=near / 4)
