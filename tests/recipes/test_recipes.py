"""Every shipped recipe parses, says what it must, and wraps its own model in its own world (a fake process group)."""

import re

import pytest
import torch
import torch.distributed as dist
from headers import predict_mfu
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AutoConfig
from world import forks

from shardbook.axes import rank_along
from shardbook.memory.activation import apply_checkpointing
from shardbook.memory.host_state import offloaded_bytes
from shardbook.model.attention import KERNELS
from shardbook.model.dtypes import DTYPES
from shardbook.model.families import load_config
from shardbook.model.shapes import shape_config
from shardbook.model.weights import is_adapter
from shardbook.parallel.experts import find_experts
from shardbook.parallel.mesh import build_mesh
from shardbook.parallel.placement import World, build_local, layout_of
from shardbook.parallel.sharding import apply_stage
from shardbook.parallel.units import shard_rows
from shardbook.plan.formulas import predict_resident
from shardbook.plan.peak import predict_peak
from shardbook.recipe import dump_recipe, list_recipes, load_recipe, resolve_precision
from shardbook.run.log.memory import kept_bytes

# The published config.json of each model, as far as it sets shapes (the hub is not reachable from a test).
LLAMA = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "smollm2-135m": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        134_515_008,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        "llama",
        LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        8_030_261_248,
    ),
    "meta-llama/Llama-3.1-70B-Instruct": (
        "llama",
        LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        70_553_706_496,
    ),
    "meta-llama/Llama-3.1-405B-Instruct": (
        "llama",
        LLAMA
        | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
        405_853_388_800,
    ),
    "Qwen/Qwen3-8B": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
        8_190_735_360,
    ),
}
# Of other families the shapes are the plan's, and the numbers of parameters the published ones.
COUNTS = {
    "smollm2-moe": 692_036_928,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "allenai/OLMoE-1B-7B-0125-Instruct": 6_919_161_856,
    "zai-org/GLM-4.5-Air": 106_852_245_504,
    "Qwen/Qwen3.5-9B": 8_953_803_264,
    "google/gemma-3-4b-it": 3_880_263_168,
    "google/gemma-3-27b-it": 27_009_346_304,
    "openai/gpt-oss-20b": 20_914_757_184,
    "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "zai-org/GLM-4-9B-0414": 9_400_279_040,
    "microsoft/phi-4": 14_659_507_200,
}
AWAY = re.compile(r"^# predicted: (\d+) GB at a rank's peak, (\d+) GB of host memory(?: and (\d+) GB of disk)?", re.M)
HEADER = re.compile(
    r"# .+\.\n(?:# .+\.\n)?# run:      (.+)\n# hardware: (\d+) .+\n(?:# predicted: .+\n)?# measured: (.+)\n"
    r'(?:method = "\w+"\n\n)?\['
)


def test_there_are_recipes():
    expected = {f"smollm2-135m-{stage}" for stage in ("fsdp", "ddp", "zero1", "zero2", "hsdp", "zeropp")}
    expected |= {"llama8b-zero2", "llama8b-fsdp", "llama70b-fsdp", "llama70b-hsdp", "qwen3-8b-fsdp"}
    expected |= {"smollm2-135m-tp", "llama70b-tp-fsdp", "llama405b-tp-fsdp", "smollm2-135m-cp", "llama8b-128k"}
    expected |= {"smollm2-135m-pp", "llama405b-3d"}
    expected |= {"llama8b-zeropp", "llama70b-zeropp", "llama8b-1gpu", "llama405b-fsdp"}
    expected |= {
        "smollm2-135m-offload",
        "smollm2-135m-nvme",
        "llama8b-offload-1gpu",
        "llama70b-offload",
        "llama70b-nvme",
    }
    expected |= {"gemma3-4b-lora", "gemma3-27b-fsdp", "gpt-oss-20b-lora", "ministral-8b-fsdp", "qwen3.5-9b-lora"}
    expected |= {"glm4-9b-fsdp", "phi4-lora", "qwen3-30b-a3b-lora", "qwen3-30b-a3b-qlora", "smollm2-moe"}
    expected |= {"qwen3-30b-a3b-ep", "glm45-air-ep", "gpt-oss-20b-ep", "olmoe-7b"}
    assert expected <= set(list_recipes())


@pytest.mark.parametrize("name", list_recipes())
def test_recipe(name, tmp_path):
    path = list_recipes()[name]
    header = HEADER.match(path.read_text())
    assert header, "header: a line or two of whole sentences, then run, hardware (starting with ranks), measured"
    command, measured = header[1], header[3]
    assert f"RECIPE={name}" in command or f"recipes/{name}.toml" in command or name == "smollm2-135m-fsdp"
    assert measured == "not yet measured" or re.search(r"\d", measured)
    recipe = load_recipe(path)
    assert recipe.train.save_total_limit != 1, "a damaged checkpoint would leave nothing to go back to"
    last = name.removesuffix("-dpo").rsplit("-", 1)[-1]
    stages = dict.fromkeys(("fsdp", "moe", "1gpu", "offload", "nvme", "qlora", "tp", "cp", "128k", "ep", "7b"), "zero3")
    stages |= {"lora": recipe.parallel.stage, "pp": "zero1", "3d": "zero1"}
    if recipe.method != "sft":
        assert f"-{recipe.method}" in name
        stages |= dict.fromkeys(("135m", "llama8b", recipe.method), "zero3")
    assert recipe.parallel.stage == stages.get(last, last)
    assert (bool(recipe.lora.r), recipe.model.load_in_4bit) == ("lora" in name, "qlora" in name)
    assert (recipe.parallel.tp_size > 1) == ("-tp" in name or name.endswith("-3d"))
    assert (recipe.parallel.ep_size > 1) == ("-moe" in name or name.endswith("-ep"))
    assert (recipe.parallel.cp_size > 1) == name.endswith(("-cp", "-128k"))
    assert (recipe.parallel.pp_size > 1) == name.endswith(("-pp", "-3d"))
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dump_recipe(recipe))
    assert load_recipe(resolved) == recipe


# Each model, stage, axis and method once, but for the models whose plans take longest; the others are slow.
DEAR = ("qwen3.5-9b-lora", "gemma3-27b-fsdp")
WRAPPED = {
    *(
        "smollm2-135m-ddp",
        "smollm2-135m-zero1",
        "smollm2-135m-zeropp",
        "smollm2-135m-pp",
        "smollm2-135m-distill",
        "smollm2-moe",
    ),
    *("llama8b-zero2", "llama8b-128k", "llama8b-qlora-1gpu", "llama8b-offload-1gpu", "llama8b-dpo", "llama8b-lora-dpo"),
    *("llama70b-hsdp", "llama70b-zeropp", "llama70b-nvme", "llama70b-lora", "llama405b-3d"),
    *("qwen3-8b-fsdp", "qwen3-30b-a3b-lora", "gpt-oss-20b-lora", "gemma3-4b-lora", "glm4-9b-fsdp", "phi4-lora"),
    *("ministral-8b-fsdp", "olmoe-7b", "glm45-air-ep"),
}


def test_a_recipe_of_each_sort_is_wrapped_in_make_test():
    """Of stages, axes and methods; but for the model whose linear attention is measured operation by operation."""
    recipes = {name: load_recipe(path) for name, path in list_recipes().items()}

    def sorts(names):
        found = {(key, getattr(recipes[n].parallel, key)) for n in names for key in ("stage", "secondary_shard")}
        sizes = "tp_size", "cp_size", "ep_size", "pp_size"
        found |= {(key, getattr(recipes[n].parallel, key) > 1) for n in names for key in sizes}
        found |= {("offload", recipes[n].offload.optimizer) for n in names}
        found |= {("method", recipes[n].method, bool(recipes[n].lora.r), recipes[n].model.load_in_4bit) for n in names}
        return found | {("family", recipes[n].model.path) for n in names}

    left = sorts(recipes) - sorts(WRAPPED)
    assert recipes.keys() >= WRAPPED and left <= {("family", recipes[name].model.path) for name in DEAR}, left


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in WRAPPED)) for name in list_recipes()]
)
def test_a_recipe_wraps_its_model_and_fits(name, tmp_path):
    path = list_recipes()[name]
    recipe, world = load_recipe(path), int(HEADER.match(path.read_text())[2])
    if count := COUNTS.get(recipe.model.path, 0):
        config = shape_config(recipe.model, recipe.data.max_length)
    else:
        family, facts, count = CONFIGS[recipe.model.path]
        config = AutoConfig.for_model(family, **facts)
    config.save_pretrained(tmp_path)
    # in a process of its own: a world is made once in a process's life
    process = forks().Process(target=wrap, args=(path, tmp_path, world, count))
    process.start()
    process.join(240)
    assert process.exitcode == 0


def wrap(path, folder, world, count):
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=world - 1, world_size=world)
    recipe = resolve_precision(load_recipe(path), "cuda")
    config = load_config(recipe.model, folder, recipe.data.max_length)
    # whoever teaches is of the same shape
    teacher = config if recipe.distill.teacher else None
    local = build_local(recipe, config, KERNELS["varlen"], teacher, world - 1, world)
    model = local.model
    added = sum(parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name))
    pp = recipe.parallel.pp_size
    if pp > 1:  # the last stage has all but the blocks of the others, and of the embedding what is tied
        others = [number for number, block in enumerate(model.all_blocks) if block is None]
        last = f"model.layers.{config.num_hidden_layers - 1}."
        count -= len(others) * sum(each.numel for name, each in local.placements.items() if name.startswith(last))
        count -= 0 if model.is_tied else config.vocab_size * config.hidden_size
        assert abs(len(others) - config.num_hidden_layers * (pp - 1) / pp) < 1
    counts = {name: local.placements[name].numel for name, _ in model.named_parameters()}
    assert sum(counts.values()) == count * (1 + bool(recipe.distill.teacher)) + added
    assert bool(added) == bool(recipe.lora.r)
    firsts = [place * world // pp for place in range(pp - 1)]  # ranks of the stages before
    others = [build_local(recipe, config, KERNELS["varlen"], teacher, first, world) for first in firsts]
    stages = [layout_of(recipe, each, World(world, min(8, world))) for each in (*others, local)]
    layout = stages[-1]
    away = offloaded_bytes(layout, 0) if recipe.offload.optimizer != "none" else {}
    if said := re.search(r"^# predicted: (\d+) GB .* MFU (0\.\d+) ", path.read_text(), re.MULTILINE):
        peak = max((predict_peak(stage, config, recipe) for stage in stages), key=lambda peak: peak.total)
        mfu = min(predict_mfu(stage, config, recipe, local.flops, 1200) for stage in stages)
        assert (said[1], said[2]) == (f"{peak.total / 1e9:.0f}", f"{mfu:.2f}"), (peak, mfu)
        assert peak.total < 0.92 * (24e9 if "24 GB" in path.read_text() else 80e9), "does not fit"
    elif said := AWAY.search(path.read_text()):
        peak = predict_peak(layout, config, recipe)
        found = (f"{peak.total / 1e9:.0f}", *(f"{away.get(where, 0) / 1e9:.0f}" for where in ("host", "disk")))
        assert said.groups("0") == found, (said.groups("0"), found)
        assert peak.total < 0.92 * (24e9 if "24 GB" in path.read_text() else 80e9), "does not fit"
    else:
        assert count < 10**9, "a recipe for GPUs says what it will take"
    apply_checkpointing(model.blocks, recipe.activation)
    apply_stage(model, layout, build_mesh(layout.sizes, "cpu"))
    shard, tp_size = layout.shards, layout.tp_size
    held = 0
    placed = [Replicate(), Shard(0)] if "dp_replicate" in layout.stage.axes else [Shard(0)]
    for name, parameter in model.named_parameters():
        assert parameter.is_meta
        assert parameter.dtype == DTYPES[recipe.at_rest if parameter.requires_grad else recipe.precision.frozen]
        # with tensor parallel every matrix is cut, but attention's where its heads cannot be dealt out evenly
        is_tp_sharded = (
            tp_size > 1 and parameter.ndim == 2 and (config.num_attention_heads % tp_size == 0 or "attn" not in name)
        )
        held += parameter.numel() // (tp_size if is_tp_sharded else 1)
        if is_tp_sharded:
            columns = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert parameter.device_mesh.mesh_dim_names == ("dp_shard", "tp")
            assert parameter.placements[-1] == Shard(int(columns)), name
        elif local.placements[name].is_expert:
            assert parameter.device_mesh.mesh_dim_names == ("dp_shard", "ep"), name
            assert [each.dim for each in parameter.placements] == [0, 0], name
        elif not layout.is_replicated:
            assert isinstance(parameter, DTensor) and list(parameter.placements) == placed, name
            assert -(-len(parameter) // shard) >= len(parameter.to_local())
    modules = {module for chunk in local.chunks for module in chunk.modules() if isinstance(module, FSDPModule)}
    split = {module for part in model.parts for module in part} | set(local.chunks) | set(find_experts(model))
    assert modules == (set() if layout.is_replicated else split)
    # what a rank keeps is its share: every matrix of these models divides evenly, so exactly
    kept = sum((p if layout.is_replicated else p.to_local()).numel() for p in model.parameters())
    if all(len(parameter) % (shard * tp_size) == 0 for parameter in model.parameters()):
        assert kept == held // shard
    assert kept_bytes(()) == 0
    # what the recipe says it needs is what its layout keeps, over all ranks
    needs, kept_by = 0, {}  # ranks with shards of one length keep the same
    for rank in range(world):
        stage = stages[rank * pp // world]
        shard = rank_along(stage.sizes, "dp_shard", rank)
        lengths = [shard_rows(shape[0], stage.shards_of(unit), shard) for unit in stage.units for shape in unit.shapes]
        key = id(stage), *lengths
        if key not in kept_by:
            kept_by[key] = predict_resident(stage, rank, recipe.optim.name).total_bytes
        needs += kept_by[key]
    assert (recipe.hardware.memory_gb or needs < 10e9) and needs / 1e9 == pytest.approx(
        recipe.hardware.memory_gb or needs / 1e9, rel=0.01
    ), needs
