"""The speed of a step on one kind of GPU, by arithmetic: products, attention, what goes through memory, the optimizer.

Invariant: an estimate for a recipe's header and for advice, never a measurement: two rates of the GPU, and every term a
count. What is not counted: gathers and reductions that take longer than what they hide behind.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from shardbook.model.causal_lm import Flops
from shardbook.optim import state_bytes
from shardbook.parallel.layout import Layout
from shardbook.plan.peak import read_widths
from shardbook.recipe import Recipe


@dataclass(frozen=True)
class Rates:
    """What a GPU attains inside a training step, per second."""

    product_flops: float  # matrix products in bf16
    attention_flops: float  # of the pairs that are not masked
    memory_bytes: float  # read plus written
    peak_flops: float  # of the data sheet, which MFU is a share of


# 640 of 989 TFLOP/s and 3.0 of 3.35 TB/s: what large products inside a step and large copies attain there
H100 = Rates(product_flops=640e12, attention_flops=250e12, memory_bytes=3.0e12, peak_flops=989e12)
PASSES = 3.5  # over what a block reads and writes beside its products: once forward, and backward twice and a half
LINK_SHARE = 0.04  # of products' time: SMs and bandwidth that collectives take, hidden though they are


def predict_mfu(
    layout: Layout, config: PreTrainedConfig, recipe: Recipe, flops: Flops, document_tokens: float, rates: Rates = H100
) -> float:
    """Model FLOPs over the peak's for a step of full rows of documents of `document_tokens` each, compiled."""
    of, itemsize = read_widths(config), layout.dtype("params").itemsize
    micros = recipe.train.gradient_accumulation_steps
    tokens = recipe.train.per_device_train_batch_size * recipe.data.max_length  # of a micro-batch
    pairs = tokens * min(document_tokens, recipe.data.max_length)
    head = config.vocab_size * of.hidden
    kind = recipe.activation.checkpointing
    again = {"full": 1.0}.get(kind, 0.0)  # forward products that backward makes again
    blocks = (flops.per_token / 6 - head) * tokens  # multiply-adds of one forward
    products = 2 * blocks * (3 + again) / rates.product_flops + 2 * head * tokens * 4 / rates.product_flops
    attention = flops.per_pair * pairs * (1 + again / 3) / rates.attention_flops
    # two norms (read, write), two sums, the rotation, the gate; the loss: fp32 logits five times
    wide = 10 * of.hidden + 2 * (of.queries + of.keys) + 3 * of.inner
    passes = (PASSES + (kind in ("full", "selective"))) * wide * config.num_hidden_layers * itemsize
    memory = tokens * (passes + config.vocab_size * 5 * 4) / rates.memory_bytes
    # casts, copies in and out of a gather, and of a reduction, of each parameter; AdamW, norm and clipping of a shard
    numel = sum(unit.numel for unit in layout.units)
    copies = numel * (2 * 2 * itemsize + itemsize + 2 * 4) / rates.memory_bytes
    shard, master = numel // layout.shards, layout.dtype("master").itemsize
    moments = 2 * state_bytes(recipe.optim.name, shard, master)  # read and written
    optimizer = (shard * 10 * master + moments) / rates.memory_bytes
    link = LINK_SHARE * (products + attention) * (layout.world_size > 1)
    seconds = micros * (products + attention + memory + copies + link) + optimizer
    return micros * flops.of(tokens, pairs) / seconds / rates.peak_flops
