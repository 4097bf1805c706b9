"""Out of memory: one line with what was predicted, what was measured, and what would fit."""

from types import SimpleNamespace

import pytest
import torch
from plans import lay_out, settings

from shardbook.parallel.sharding import ShardedModel
from shardbook.ranks.exits import RunFailed
from shardbook.run.log.memory import kept_bytes
from shardbook.run.out_of_memory import OomGuard


def test_kept_bytes_counts_each_storage_once():
    base = torch.zeros(100)
    assert kept_bytes([base[:10], base[50:], None, torch.zeros(3, dtype=torch.bfloat16)]) == 400 + 6


def test_out_of_memory_says_what_was_predicted_measured_and_would_fit(monkeypatch):
    """As on a GPU of 2 GB, whose allocator gave up."""
    recipe = settings(parallel={"stage": "zero2"}, data={"max_length": 8192})
    layout, made = lay_out(recipe, layers=32)
    model = torch.nn.Linear(1000, 1000, bias=False)
    model(torch.ones(1, 1000)).sum().backward()
    fits = OomGuard(
        SimpleNamespace(layout=layout, config=made, recipe=recipe, no_plan_reason=""), ShardedModel(model, layout, {})
    )
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=2 * 10**9),
        "max_memory_allocated": lambda: 19 * 10**8,
        "max_memory_reserved": lambda: 2 * 10**9,
        "memory_stats": dict,
        "reset_peak_memory_stats": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    message = (
        r"^out of memory: CUDA out of memory. Predicted at the peak: 4\.7 GB \(params 0\.0, .*activations 4\.6, "
        r"working 0\.1\)\. Measured in GB: params 0\.0, grads 0\.0, optimizer 0\.0, peak 1\.9, reserved_peak 2\.0\. "
        r"The smallest change that would fit: train\.per_device_train_batch_size=2 "
        r"train\.gradient_accumulation_steps=4$"
    )
    with pytest.raises(RunFailed, match=message), fits:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 MiB")
    with pytest.raises(RuntimeError, match="another"), fits:
        raise RuntimeError("another error passes")
    monkeypatch.undo()
    on_cpu = (
        r"^out of memory: the machine gives no more memory to a tensor of \d+\.\d GB\. Predicted at the peak: 4\.7 GB "
        r".*\. Measured in GB: params 0\.0, grads 0\.0, optimizer 0\.0\. "
    )
    with pytest.raises(RunFailed, match=on_cpu), fits:
        torch.empty(2**60, dtype=torch.uint8)  # torch's own error, on any machine
    with pytest.raises(RunFailed, match=r"^out of memory: the machine gives no more memory\. Predicted"), fits:
        raise MemoryError
