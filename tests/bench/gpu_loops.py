"""The loops that one would write without Shardbook, on one GPU, on whole rows: torch's own fully_shard, transformers'
Trainer, and peft's LoRA on a base in bf16.

    python tests/bench/gpu_loops.py fsdp2|trainer|peft OUT STEPS MODEL TOKENIZER ROWS LENGTH BATCH
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bare_loop import read_rows
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from watch import watch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def build(model_at: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        config = AutoConfig.from_pretrained(model_at, use_cache=False)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()


def train(model: nn.Module, rows: Tensor, steps: int, batch: int, out: Path, trained: Sequence[nn.Parameter]) -> None:
    """AdamW, fused, of clipped gradients; the loss is read every third step."""
    optimizer = torch.optim.AdamW(trained, lr=2e-5, weight_decay=0.0, fused=True)
    with watch(steps, out):
        for step in range(steps):
            ids = rows[[(step * batch + row) % len(rows) for row in range(batch)]].to(DEVICE, non_blocking=True)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 0:
                print(f"step {step + 1} loss {loss.item():.4f}", flush=True)


def fsdp2(model_at: str, rows: Tensor, steps: int, batch: int, out: Path) -> None:
    """Each block a unit, compiled; products in bf16, masters and reductions in fp32."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    backend = "cpu:gloo,cuda:nccl" if CUDA else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model, mesh = build(model_at, torch.float32), init_device_mesh(DEVICE, (1,))
    params = torch.bfloat16 if CUDA else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=params, reduce_dtype=torch.float32)
    for block in model.model.layers:
        if CUDA:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    train(model, rows, steps, batch, out, list(model.parameters()))


def trainer(model_at: str, rows: Tensor, steps: int, batch: int, out: Path) -> None:
    """transformers' Trainer as its examples start it: autocast to bf16, nothing compiled."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(out.parent / "trainer"),
        per_device_train_batch_size=batch,
        max_steps=steps,
        optim="adamw_torch_fused",
        learning_rate=2e-5,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=CUDA,
        use_cpu=not CUDA,
    )
    examples: Any = [{"input_ids": row, "labels": row} for row in rows]
    with watch(steps, out):
        Trainer(model=build(model_at, torch.float32), args=arguments, train_dataset=examples).train()


def peft(model_at: str, rows: Tensor, steps: int, batch: int, out: Path) -> None:
    """Adapters of rank 16 on every linear of a base in bf16, each block recomputed."""
    from peft import LoraConfig, get_peft_model

    model = build(model_at, torch.bfloat16 if CUDA else torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    adapted: Any = get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    train(adapted, rows, steps, batch, out, [each for each in adapted.parameters() if each.requires_grad])


LOOPS: dict[str, Callable[[str, Tensor, int, int, Path], None]] = {"fsdp2": fsdp2, "trainer": trainer, "peft": peft}

if __name__ == "__main__":
    name, out, steps, model_at, tokenizer, file, length, batch = sys.argv[1:]
    LOOPS[name](model_at, read_rows(file, tokenizer, int(length)), int(steps), int(batch), Path(out))
