"""Loading weights: each rank's memory grows by its shard and at most one more tensor, measured by the kernel."""

import torch
from tiny import config, tokenizer
from transformers import AutoModelForCausalLM
from world import run_world

MIB = 2**20
SLACK = 6 * MIB  # of the Python heap, headers and the allocator; a quarter of the largest tensor


def load(folder):
    """Peak growth of resident memory while loading, this rank's shard, and the largest tensor, in bytes."""
    import gc
    from pathlib import Path

    from shardbook.ranks.distributed import start_distributed
    from shardbook.parallel.mesh import build_mesh
    from shardbook.run.metrics import kept_bytes
    from shardbook.model.causal_lm import build_model, materialize
    from shardbook.model.families import load_config
    from shardbook.recipe import Model, Parallel, Precision
    from shardbook.parallel.layout import build_layout
    from shardbook.parallel.sharding import apply_stage
    from shardbook.model.weights import load_weights

    ranks = start_distributed()
    model = build_model(load_config(Model(path=str(folder)), folder, 64), "fp32")
    parts, world = (model, model.parts, model.blocks), (ranks.world_size, ranks.ranks_per_node)
    layout = build_layout(Parallel(), Precision(params="fp32"), *parts, *world)
    apply_stage(model, layout, build_mesh(layout.sizes, "cpu"))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (VmHWM) to what is resident now
    before = resident("VmHWM")
    materialize(model, ranks.device)
    load_weights(model, folder)
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    return resident("VmHWM") - before, kept_bytes(model.parameters()), largest


def resident(field: str) -> int:
    from pathlib import Path

    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def whole_first(folder):
    """Planted bug: every rank reads the whole file and keeps what it needs."""
    import shardbook.model.weights as weights

    before = weights._open

    def greedy(path):
        file = before(path)
        weights.kept = [file.get_tensor(name).clone() for name in file.keys()]  # noqa: SIM118
        return file

    weights._open = greedy
    return load(folder)


def test_peak_memory_of_loading(tmp_path):
    made = config(hidden_size=512, intermediate_size=2048, num_hidden_layers=6, vocab=12_000, num_attention_heads=8)
    AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    for peak, shard, largest in run_world(2, load, tmp_path):
        assert shard > 2 * largest and largest > 20 * MIB  # the bound below tells one tensor from two
        assert peak <= shard + largest + SLACK, f"{peak / MIB:.0f} MiB"
        print(f"peak {peak / MIB:.1f} MiB: shard {shard / MIB:.1f}, largest tensor {largest / MIB:.1f}")
    for peak, shard, largest in run_world(2, whole_first, tmp_path):
        assert peak > shard + largest + SLACK
