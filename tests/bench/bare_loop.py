"""The loop that one would write without Shardbook: transformers' model, autocast to bf16, torch's fused AdamW,
gradients clipped, each block compiled. fp32 weights and moments, so that it keeps what `zero3` keeps on one GPU. On the
same rows, one document a row (`data.packing = false`).

    python tests/bench/bare_loop.py OUT STEPS MODEL TOKENIZER ROWS LENGTH BATCH CHECKPOINTING
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from watch import watch


def read_rows(file: str, tokenizer: str, length: int) -> torch.Tensor:
    """[rows, length] int64; texts shorter than that are an error."""
    encode = AutoTokenizer.from_pretrained(tokenizer)
    texts = [json.loads(line)["text"] for line in Path(file).read_text().splitlines()]
    return torch.tensor([encode(text)["input_ids"][:length] for text in texts])


def main(out: str, steps: int, model_at: str, tokenizer: str, file: str, length: int, batch: int, checkpointing: str):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rows = read_rows(file, tokenizer, length)
    config = AutoConfig.from_pretrained(model_at, use_cache=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if device == "cuda":
        for block in model.model.layers:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0, fused=True)
    with watch(steps, Path(out)):
        for step in range(steps):
            chosen = [(step * batch + row) % len(rows) for row in range(batch)]
            ids = rows[chosen].to(device, non_blocking=True)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    out, steps, model_at, tokenizer, file, length, batch, checkpointing = sys.argv[1:]
    main(out, int(steps), model_at, tokenizer, file, int(length), int(batch), checkpointing)
