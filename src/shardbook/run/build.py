"""Builds what a job trains: its sharded model, then its memory and its optimizer.

Invariant: the order. Compile sees blocks that are recomputed, the stage sees compiled ones, and memory is given to what
the stage has cut.
"""

import torch

from shardbook.memory.activation import apply_checkpointing
from shardbook.memory.block_inputs import offload_block_inputs
from shardbook.memory.host_adamw import offload_state
from shardbook.model.causal_lm import CausalLM, apply_compile, materialize
from shardbook.optim import build_optimizer
from shardbook.parallel.mesh import build_mesh
from shardbook.parallel.sharding import ShardedModel, apply_stage
from shardbook.recipe import Optim
from shardbook.run.prepare import Job


def build_sharded(job: Job, device: torch.device) -> ShardedModel:
    """Applies checkpointing, compile and the stage to the job's model, in place; it has no memory yet. Collective."""
    activation, model = job.recipe.activation, job.model
    recomputed = apply_checkpointing(model.all_blocks, activation, job.recipe.lora.lora_dropout > 0)
    offload_block_inputs(model, recomputed, job.recipe.offload)
    if job.recipe.train.compile:
        apply_compile(model)
    return apply_stage(model, job.layout, build_mesh(job.layout.sizes, device.type))


def allocate_state(
    model: CausalLM, sharded: ShardedModel, optim: Optim, device: torch.device, seed: int = 0
) -> torch.optim.Optimizer:
    """Gives the model memory, on the device and wherever its layout's offload says, and returns its optimizer, which
    has the run's `seed`. The memory is uninitialized: load into `sharded.masters`, then `sharded.upload_shards()`
    copies it to where it is used.

    Raises RecipeError, the same on every rank, where host or disk of a node have too little room. Collective.
    """
    if sharded.layout.steps_on_host:
        return offload_state(model, sharded, optim, device)
    materialize(model, device)
    return build_optimizer(model, optim, seed, sharded.layout.trained_shapes)
