"""One tiny Llama's step under each checkpointing: FLOPs, bytes kept between forward and backward, gradients."""

import torch
from live import allocated
from tiny import config
from torch.utils.flop_counter import FlopCounterMode

from shardbook.data.loader import Batching, build_micro_batch
from shardbook.memory.activation import apply_checkpointing
from shardbook.model.causal_lm import apply_compile, build_model, materialize
from shardbook.objectives.sft import sft_loss
from shardbook.recipe import Activation

LENGTH, WIDTH, INNER, HEADS, HEAD, LAYERS, ROWS = 64, 32, 48, 4, 8, 4, 2
# multiply-adds count as two; q, k, v, o and the three of the MLP, of one block, for all tokens
MATMULS = 2 * ROWS * LENGTH * (2 * WIDTH * HEADS * HEAD + 2 * WIDTH * 2 * HEAD + 3 * WIDTH * INNER)
ATTENTION = 2 * 2 * ROWS * HEADS * HEAD * LENGTH * LENGTH  # scores, and their product with the values
FORWARD = MATMULS + ATTENTION  # of one block


def build(checkpointing: str, compiled: bool = False):
    torch.manual_seed(0)
    model = build_model(config("llama", num_hidden_layers=LAYERS, attn_implementation="sdpa"), "fp32")
    materialize(model, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    apply_checkpointing(model.blocks, Activation(checkpointing=checkpointing))
    if compiled:
        apply_compile(model)
    return model


def build_batch():
    ids = torch.randint(0, 259, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    documents = [{"input_ids": row, "mask": [True] * LENGTH} for row in ids]
    return build_micro_batch(documents, [(row,) for row in range(ROWS)], Batching(None, ROWS, 0, 1))


def loss_of(model, micro):
    return sft_loss(model, micro)


def gradients(model, micro):
    loss_of(model, micro).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def flops(checkpointing: str, micro) -> int:
    def attention(query, key, value, *_, out_val=None, **__):  # shapes; torch's counter does not know the CPU's kernel
        return 2 * 2 * query.numel() * key[-2]

    model = build(checkpointing)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={kernel: attention}) as counter:
        gradients(model, micro)
    return counter.get_total_flops()


def kept_bytes(checkpointing: str, micro, compiled: bool = False) -> int:
    """What lies between forward and backward, beyond the model. A first pass warms up what is made once."""
    model = build(checkpointing, compiled)
    loss_of(model, micro).backward()
    model.zero_grad()
    return allocated(lambda: loss_of(model, micro))[1]
