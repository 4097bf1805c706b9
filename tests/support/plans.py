"""Plans for tests: recipes of known shapes, and what is reported of them on a cluster."""

from tiny import config
from transformers import Gemma3TextConfig, GptOssConfig, Qwen3NextConfig

from shardbook.cli import PLAIN
from shardbook.model.attention import KERNELS
from shardbook.model.causal_lm import build_model
from shardbook.parallel.layout import build_layout
from shardbook.plan.hardware import build_cluster
from shardbook.plan.report import make_report
from shardbook.recipe import Precision, Recipe, parse_recipe, resolve_precision

ORDER = ["ddp", "zero1", "zero2", "zero3"]


def report_on(recipe, gpu, gpus, **node):
    return make_report(recipe, gpu, build_cluster(gpu, gpus, **node))


def plan_of(model, *words):
    return parse_recipe(PLAIN, "test", [f"model.path={model}", *words])


def settings(**sections):
    words = {"data": {"max_length": 2048}, "train": {"steps": 1, "per_device_train_batch_size": 8}} | sections
    return Recipe.model_validate(words)


def lay_out(recipe, world=4, layers=8):
    made = shape(num_hidden_layers=layers)
    model = build_model(made, "fp32", attention=KERNELS["varlen"])
    precision = Precision(params="bf16")
    return build_layout(recipe.parallel, precision, model, model.parts, model.blocks, world, 4), made


def simulated_recipe(stage, checkpointing, micros, *more):
    words = ["model.path=llama-3.1-8b", "data.max_length=1024", f"parallel.stage={stage}"]
    words += [f"activation.checkpointing={checkpointing}", f"train.gradient_accumulation_steps={micros}"]
    return resolve_precision(parse_recipe(PLAIN, "test", [*words, *more]), "cuda")


def with_layers(config, layers):
    words = config.to_dict() | {"num_hidden_layers": layers}
    words.pop("layer_types", None)
    return type(config)(**words)


SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
}
NEAR = "sliding_attention"
MIXED = {
    "gemma3_text": (
        Gemma3TextConfig,
        {"layer_types": [*[NEAR] * 2, "full_attention", NEAR]},
    ),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_next": (
        Qwen3NextConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
}


def shape(family="llama", **changes):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return config(family, **(sizes | {"head_dim": 16, "num_hidden_layers": 1} | changes))
