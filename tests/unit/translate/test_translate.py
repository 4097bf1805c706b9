"""DeepSpeed and accelerate configurations, written after their public documentation: what each becomes, or which of its
keys are refused. No key of any of them may go unnamed."""

import json

import pytest
import yaml
from transformers import TrainingArguments

from shardbook.cli import main
from shardbook.recipe import RecipeError, find_stage, parse_recipe
from shardbook.translate import translate
from shardbook.translate.deepspeed import AUTO
from shardbook.translate.rules import Entry
from shardbook.translate.settle import drop_refused
from shardbook.translate.write import NOTHING, write_recipe

BUCKETS = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8}
ADAMW = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}}
OF_TRAINER = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
HF_ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
HF_WARMUP = {
    "type": "WarmupLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
}

# name: (configuration, settings that it must become among others, keys that must be refused)
DEEPSPEED = {
    "the getting-started page": (
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
            "fp16": {"enabled": True},
            "zero_optimization": True,
        },
        {"optim.learning_rate": 0.00015},
        ["train_batch_size", "fp16", "zero_optimization"],
    ),
    "transformers, zero 2": (
        {
            **OF_TRAINER,
            "bf16": {"enabled": "auto"},
            "optimizer": HF_ADAMW,
            "scheduler": HF_WARMUP,
            "zero_optimization": {"stage": 2, "allgather_partitions": True, "reduce_scatter": True, **BUCKETS},
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        {
            "parallel.stage": "zero2",
            "optim.name": "adamw",
            "optim.lr_scheduler_type": "constant",
            "train.logging_steps": 2000,
        },
        [],
    ),
    "transformers, zero 2 with offload": (
        {
            **OF_TRAINER,
            "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, **BUCKETS},
        },
        {"parallel.stage": "zero2", "offload.optimizer": "cpu"},
        [],
    ),
    "transformers, zero 3 without offload": (
        {
            **OF_TRAINER,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "none"},
                "offload_param": {"device": "none"},
                "sub_group_size": 1e9,
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
                **BUCKETS,
            },
            "gradient_clipping": 1.0,
        },
        {
            "parallel.stage": "zero3",
            "precision.params": "bf16",
            "train.export_dtype": "bf16",
            "optim.max_grad_norm": 1.0,
        },
        [],
    ),
    "transformers, zero 3 with NVMe": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4},
                "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"},
            },
            "aio": {"block_size": 262144, "queue_depth": 32},
            "bf16": {"enabled": True},
        },
        {
            "parallel.stage": "zero3",
            "offload.optimizer": "nvme",
            "offload.params": "nvme",
            "offload.path": "/local_nvme",
        },
        [],
    ),
    "the configuration page, plain": (
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "optimizer": ADAMW,
            "scheduler": WARMUP,
            "gradient_clipping": 0.5,
            "prescale_gradients": False,
            "gradient_predivide_factor": 1.0,
        },
        {
            "parallel.stage": "ddp",  # stage 0 where it is absent
            "precision.params": "fp32",
            "train.per_device_train_batch_size": 4,
            "train.gradient_accumulation_steps": 2,
            "optim.learning_rate": 3e-5,
            "optim.betas": [0.8, 0.999],
            "optim.weight_decay": 3e-7,
            "optim.warmup_steps": 500,
            "optim.max_grad_norm": 0.5,
        },
        [],
    ),
    "defaults of its own": (
        {
            "scheduler": {"type": "WarmupLR"},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}},
            "bf16": {"enabled": False},
        },
        {
            "precision.params": "fp32",
            "optim.learning_rate": 1e-3,  # warmup_max_lr's; a scheduler's is the one that its steps have
            "optim.warmup_steps": 1000,
        },
        [],
    ),
    "an optimizer's defaults": (
        {"optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}, "scheduler": {"type": "WarmupCosineLR"}},
        {"precision.params": "bf16", "optim.learning_rate": 1e-3, "optim.warmup_steps": 1000},
        [],
    ),
    "a batch of all ranks": (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
        {"train.per_device_train_batch_size": 4},
        ["train_batch_size"],
    ),
    "zero 1": (
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}, "bf16": {"enabled": True}},
        {"parallel.stage": "zero1", "optim.max_grad_norm": 0.0},
        [],
    ),
    "ZeRO++ tutorial": (
        {
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 16,
                "zero_quantized_gradients": True,
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
            "bf16": {"enabled": True},
        },
        {
            "parallel.stage": "zeropp",
            "parallel.quantize_weights": 8,
            "parallel.secondary_shard": 16,
            "parallel.quantize_gradients": [8, 4],
        },
        [],
    ),
    "ZeRO++ switched off": (
        {
            "zero_optimization": {"stage": 3, "zero_quantized_weights": False, "zero_hpz_partition_size": 1},
            "bf16": {"enabled": True},
        },
        {"parallel.stage": "zero3"},
        [],
    ),
    "ZeRO++ on a stage in quotes": (
        {"zero_optimization": {"stage": "3", "zero_quantized_weights": True}, "bf16": {"enabled": True}},
        {"parallel.stage": "zeropp", "parallel.quantize_weights": 8},
        [],
    ),
    "ZeRO++ on stage 2": (
        {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}, "bf16": {"enabled": True}},
        {"parallel.stage": "zero2"},
        ["zero_optimization.zero_quantized_gradients"],
    ),
    "MiCS tutorial": (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 8, "mics_hierarchical_params_gather": False}},
        {"parallel.stage": "hsdp", "parallel.dp_shard_size": 8},
        [],
    ),
    "a cosine with a length": (
        {
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 1000, "warmup_num_steps": 100, "warmup_min_ratio": 0.0},
            },
        },
        {"train.steps": 1000, "optim.warmup_steps": 100, "optim.lr_scheduler_type": "cosine"},
        [],
    ),
    "a linear decay": (
        {
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "total_num_steps": 2000,
                    "warmup_num_steps": 10,
                    "warmup_max_lr": 1e-3,
                    "warmup_type": "linear",
                },
            }
        },
        {"train.steps": 2000, "optim.lr_scheduler_type": "linear", "optim.learning_rate": 1e-3},
        [],
    ),
    "one cycle with LAMB": (
        {
            "optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 0.3}},
            "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}},
        },
        {},
        ["optimizer", "scheduler"],
    ),
    "1-bit Adam": (
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 2e-4, "freeze_step": 400, "comm_backend_name": "nccl"}}},
        {},
        ["optimizer"],
    ),
    "monitors and profilers": (
        {
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
            "wandb": {"enabled": True, "team": "mine", "project": "tuning"},
            "tensorboard": {"enabled": False},
            "csv_monitor": {"enabled": True, "output_path": "logs"},
            "flops_profiler": {"enabled": True, "profile_step": 1},
            "comms_logger": {"enabled": True, "verbose": False},
        },
        {"run.report_to": "wandb", "run.project": "tuning"},
        [],
    ),
    "activation checkpointing in shards": (
        {
            "activation_checkpointing": {
                "partition_activations": True,
                "cpu_checkpointing": True,
                "contiguous_memory_optimization": False,
                "number_checkpoints": None,
            }
        },
        {"offload.activations": "cpu", "activation.checkpointing": "full"},
        [],
    ),
    "AutoTP tutorial": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
            "tensor_parallel": {"autotp_size": 4},
        },
        {"parallel.stage": "zero2", "parallel.tp_size": 4},
        [],
    ),
    "the configuration page, AutoTP": (
        {
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {
                "autotp_size": 4,
                "preset_model": "llama",
                "tp_overlap_comm": False,
                "vocab_parallel_lm_head": False,
                "partition_config": {
                    "use_default_specs": False,
                    "layer_specs": [{"patterns": [".*\\.o_proj\\.weight$"], "partition_type": "row"}],
                },
            },
            "activation_checkpointing": {"partition_activations": True},
        },
        {"parallel.stage": "zero1", "parallel.tp_size": 4},
        ["tensor_parallel.partition_config"],
    ),
    "AutoTP off, in the older place, with sequences": (
        {
            "zero_optimization": {"stage": 3},
            "tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 2, "tp_grain_size": 64}},
            "sequence_parallel_size": 2,
        },
        {"parallel.stage": "zero3", "parallel.tp_size": None, "parallel.cp_size": 2},
        ["tensor_parallel.tp.tp_size"],
    ),
    "AutoTP of one rank": (
        {
            "zero_optimization": {"stage": 3},
            "tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}},
            "sequence_parallel_size": 1,
        },
        {"parallel.stage": "zero3", "parallel.tp_size": None, "parallel.cp_size": None},
        [],
    ),
    "sequences of eight ranks, two of which share matrices": (
        {
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
            "sequence_parallel_size": 4,
            "data_parallel_size": 2,
            "seq_parallel_communication_data_type": "bf16",
            "tensor_parallel": {"autotp_size": 2},
        },
        {
            "parallel.stage": "zero2",
            "parallel.cp_size": 4,
            "parallel.tp_size": 2,
            "parallel.dp_shard_size": None,
            "precision.reduce": None,
        },
        [],
    ),
    "DeepSpeed's example of AutoEP": (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "expert_parallel": {
                "enabled": True,
                "autoep_size": 8,
                "preset_model": "qwen3_5_moe",
                "load_balance_coeff": None,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
        },
        {"parallel.stage": "zero1", "parallel.ep_size": 8, "train.per_device_train_batch_size": 2},
        [],
    ),
    "AutoEP's tutorial, with words for its products and exchanges, and for what a router does anyway": (
        {
            "zero_optimization": {"stage": 3},
            "expert_parallel": {
                "enabled": True,
                "autoep_size": 8,
                "preset_model": "mixtral",
                "use_grouped_mm": False,
                "comm_backend": "deepep",
                "comm_max_tokens_per_rank": 8192,
                "expert_w1": "gate_up_proj",
                "expert_w3": None,
                "has_shared_experts": False,
                "expert_tensor_parallel_size": 1,
                "route_norm": None,
                "route_scale": 1.0,
                "score_apply": "post",
                "score_func": "auto",
                "top_k": "auto",
                "routed_scaling_factor": "auto",
            },
            "use_data_before_expert_parallelism": True,
            "sequence_parallel_size": 2,
        },
        {"parallel.stage": "zero3", "parallel.ep_size": 8, "parallel.cp_size": 2},
        [],
    ),
    "AutoEP with a router of its own": (
        {
            "zero_optimization": {"stage": 2},
            "expert_parallel": {
                "enabled": True,
                "autoep_size": 4,
                "expert_tensor_parallel_size": 2,
                "load_balance_coeff": 1e-3,
                "route_norm": False,
                "route_scale": 2.5,
                "score_apply": "pre",
                "top_k": 4,
                "num_expert_groups": 8,
                "autoep_sizes": 2,
            },
        },
        {"parallel.stage": "zero2", "parallel.ep_size": 4, "train.router_aux_loss_coef": None},
        [
            *(f"expert_parallel.{name}" for name in ("expert_tensor_parallel_size", "load_balance_coeff")),
            *(f"expert_parallel.{name}" for name in ("route_norm", "route_scale", "score_apply", "top_k")),
            *(f"expert_parallel.{name}" for name in ("num_expert_groups", "autoep_sizes")),
        ],
    ),
    "AutoEP that is off": (
        {
            "zero_optimization": {"stage": 2},
            "expert_parallel": {"enabled": False, "autoep_size": 4, "top_k": 4, "preset_model": "mixtral"},
        },
        {"parallel.stage": "zero2", "parallel.ep_size": None},
        [],
    ),
    "AutoEP that nothing switches on": (
        {"zero_optimization": {"stage": 2}, "expert_parallel": {"autoep_size": 4, "load_balance_coeff": 1e-3}},
        {"parallel.stage": "zero2", "parallel.ep_size": None},
        [],
    ),
    "AutoEP that a word in quotes switches on": (
        {"zero_optimization": {"stage": 2}, "expert_parallel": {"enabled": "yes", "autoep_size": 4}},
        {"parallel.ep_size": 4},
        ["expert_parallel.enabled"],
    ),
    "AutoEP of one rank": (
        {"zero_optimization": {"stage": 2}, "expert_parallel": {"enabled": True, "autoep_size": 1}},
        {"parallel.stage": "zero2", "parallel.ep_size": None},
        [],
    ),
    "AutoEP and AutoTP": (
        {
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"autotp_size": 2},
            "expert_parallel": {"enabled": True, "autoep_size": 4},
        },
        {"parallel.stage": "zero1", "parallel.tp_size": None, "parallel.ep_size": None},
        ["tensor_parallel.autotp_size", "expert_parallel.autoep_size"],
    ),
    "a pipeline": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 8,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "pipeline": {
                "stages": 4,
                "partition": "best",
                "seed_layers": False,
                "activation_checkpoint_interval": 1,
                "pipe_partitioned": True,
                "grad_partitioned": True,
            },
        },
        {
            "parallel.stage": "zero1",
            "parallel.pp_size": 4,
            "train.gradient_accumulation_steps": 8,
            "activation.checkpointing": "full",
        },
        [],
    ),
    "a pipeline whose stages the script says, split by hand": (
        {
            "zero_optimization": {"stage": 1},
            "pipeline": {"stages": "auto", "partition": "type:decoder", "activation_checkpoint_interval": 0, "odd": 1},
        },
        {"parallel.stage": "zero1", "parallel.pp_size": None, "activation.checkpointing": None},
        ["pipeline.partition", "pipeline.odd"],
    ),
    "a pipeline, offloaded": (
        {
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
            "pipeline": {"stages": 2, "activation_checkpoint_interval": 4},
            "sequence_parallel_size": 2,
        },
        {
            "offload.optimizer": "cpu",
            "parallel.pp_size": 2,
            "parallel.cp_size": 2,
            "activation.checkpointing": "full",
        },
        [],
    ),
    "sequences and qwZ": (
        {
            "zero_optimization": {"stage": 3, "zero_quantized_weights": True},
            "sequence_parallel_size": 2,
            "tensor_parallel": {"autotp_size": 2},
        },
        {"parallel.stage": "zeropp", "parallel.cp_size": None, "parallel.tp_size": None},
        ["sequence_parallel_size", "tensor_parallel.autotp_size"],
    ),
    "sequences and AutoTP, offloaded": (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "sequence_parallel_size": 2,
            "tensor_parallel": {"autotp_size": 2},
        },
        {"offload.optimizer": "cpu", "parallel.tp_size": 2, "parallel.cp_size": 2},
        [],
    ),
    "sequences of three ranks, offloaded with AutoTP": (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "sequence_parallel_size": 6,
            "tensor_parallel": {"autotp_size": 2},
        },
        {"offload.optimizer": "cpu", "parallel.tp_size": None, "parallel.cp_size": None},
        ["sequence_parallel_size", "tensor_parallel.autotp_size"],
    ),
    "AutoTP and hpZ": (
        {
            "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8},
            "tensor_parallel": {"autotp_size": 8},
        },
        {"parallel.stage": "zeropp", "parallel.secondary_shard": 8, "parallel.tp_size": None},
        ["tensor_parallel.autotp_size"],
    ),
    "AutoTP, offloaded": (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "tensor_parallel": {"autotp_size": 2},
        },
        {"offload.optimizer": "cpu", "parallel.tp_size": 2},
        [],
    ),
    "dtypes on the wire": (
        {"bf16": {"enabled": True}, "communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}},
        {"precision.reduce": "bf16"},
        ["data_types.grad_accum_dtype"],
    ),
    "data efficiency and pruning": (
        {"data_efficiency": {"enabled": True}, "compression_training": {"weight_quantization": {}}},
        {},
        ["data_efficiency", "compression_training"],
    ),
    "misspelt": (
        {"zero_optimization": {"stage": 3, "overlap_com": True}, "gradient_cliping": 1.0},
        {},
        ["zero_optimization.overlap_com", "gradient_cliping"],
    ),
}
LAUNCH = {
    "compute_environment": "LOCAL_MACHINE",
    "machine_rank": 0,
    "num_machines": 1,
    "num_processes": 8,
    "use_cpu": False,
}
ACCELERATE = {
    "fsdp 1, full shard": (
        {
            **LAUNCH,
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "fsdp_config": {
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
                "fsdp_backward_prefetch": "BACKWARD_PRE",
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_forward_prefetch": False,
                "fsdp_offload_params": False,
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_sync_module_states": True,
                "fsdp_use_orig_params": True,
            },
        },
        {"parallel.stage": "zero3", "parallel.backward_prefetch": 1, "precision.params": "bf16"},
        [],
    ),
    "fsdp 2": (
        {
            **LAUNCH,
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": True,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_activation_checkpointing": True,
            },
        },
        {"parallel.stage": "zero3", "activation.checkpointing": "full"},
        [],
    ),
    "one process, NO without quotes": (
        {"distributed_type": False, "mixed_precision": False, "dynamo_config": {"dynamo_backend": False}},
        {"parallel.stage": "ddp", "precision.params": "fp32", "train.compile": None},
        [],
    ),
    "compiled by another, with a key that is not known": (
        {"dynamo_config": {"dynamo_backend": "AOT_EAGER", "dynamo_mode": "default", "dynamo_use_fullgrap": True}},
        {"train.compile": None},
        ["dynamo_config.dynamo_backend", "dynamo_config.dynamo_use_fullgrap"],
    ),
    "fsdp 2, gathered through a step": (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}},
        {"parallel.stage": "zero2"},
        [],
    ),
    "shard grad op, by number, wrapped by size": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_sharding_strategy": 2,
                "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
                "fsdp_min_num_params": 100000000,
                "fsdp_backward_prefetch_policy": "NO_PREFETCH",
            },
        },
        {"parallel.stage": "zero2"},
        [],
    ),
    "hybrid shard over two machines": (
        {
            **LAUNCH,
            "num_machines": 2,
            "num_processes": 16,
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_forward_prefetch": True},
        },
        {"parallel.stage": "hsdp", "parallel.dp_shard_size": 8, "parallel.forward_prefetch": 1},
        [],
    ),
    "hybrid shard of zero 2, offloaded": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2", "fsdp_offload_params": True},
        },
        {"offload.optimizer": "cpu", "offload.params": "cpu"},
        ["fsdp_config.fsdp_sharding_strategy"],
    ),
    "deepspeed, inline": (
        {
            **LAUNCH,
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            "deepspeed_config": {
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 1.0,
                "offload_optimizer_device": "none",
                "offload_param_device": "none",
                "zero3_init_flag": True,
                "zero3_save_16bit_model": True,
                "zero_stage": 3,
            },
        },
        {"parallel.stage": "zero3", "train.gradient_accumulation_steps": 4, "train.export_dtype": "bf16"},
        [],
    ),
    "several GPUs, compiled": (
        {
            **LAUNCH,
            "distributed_type": "MULTI_GPU",
            "mixed_precision": "no",
            "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"},
        },
        {"parallel.stage": "ddp", "precision.params": "fp32", "train.compile": True},
        [],
    ),
    "replicas and shards": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 4,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 1,
            },
        },
        {"parallel.stage": "hsdp", "parallel.dp_replicate_size": 2, "parallel.dp_shard_size": 4},
        [],
    ),
    "tensor parallel, inside shards, inside replicas": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 4,
                "parallelism_config_cp_size": 1,
                "parallelism_config_cp_backend": "torch",
                "parallelism_config_cp_comm_strategy": "allgather",
                "parallelism_config_sp_size": 1,
                "parallelism_config_sp_backend": "deepspeed",
            },
        },
        {
            "parallel.stage": "hsdp",
            "parallel.dp_replicate_size": 2,
            "parallel.dp_shard_size": 2,
            "parallel.tp_size": 4,
        },
        [],
    ),
    "hybrid shard inside machines, tensor parallel inside that": (
        {
            **LAUNCH,
            "num_machines": 2,
            "num_processes": 16,
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "HYBRID_SHARD"},
            "parallelism_config": {"parallelism_config_tp_size": 2},
        },
        {"parallel.stage": "hsdp", "parallel.dp_shard_size": 4, "parallel.tp_size": 2},
        [],
    ),
    "context parallel, inside shards, inside replicas": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 2,
                "parallelism_config_cp_size": 4,
                "parallelism_config_cp_backend": "torch",
                "parallelism_config_cp_comm_strategy": "alltoall",
            },
        },
        {
            "parallel.stage": "hsdp",
            "parallel.dp_replicate_size": 2,
            "parallel.dp_shard_size": 2,
            "parallel.cp_size": 4,
            "parallel.tp_size": 2,
        },
        [],
    ),
    "hybrid shard inside machines, both axes inside that": (
        {
            **LAUNCH,
            "num_machines": 2,
            "num_processes": 16,
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "HYBRID_SHARD"},
            "parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 2},
        },
        {"parallel.stage": "hsdp", "parallel.dp_shard_size": 2, "parallel.tp_size": 2, "parallel.cp_size": 2},
        [],
    ),
    "trl's Ulysses on four GPUs": (
        {
            **LAUNCH,
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            "num_machines": 1,
            "num_processes": 4,
            "deepspeed_config": {"zero_stage": 3, "seq_parallel_communication_data_type": "bf16"},
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 1,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 1,
                "parallelism_config_sp_size": 2,
                "parallelism_config_sp_backend": "deepspeed",
                "parallelism_config_sp_seq_length": 8192,
                "parallelism_config_sp_seq_length_is_variable": True,
                "parallelism_config_sp_attn_implementation": "flash_attention_2",
            },
        },
        {"parallel.stage": "zero3", "parallel.cp_size": 2, "parallel.dp_shard_size": None},
        [],
    ),
    "Ulysses beside what accelerate calls replicas, which ZeRO shards over": (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"zero_stage": 2},
            "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_sp_size": 2},
        },
        {"parallel.stage": "zero2", "parallel.cp_size": 2, "parallel.dp_replicate_size": None},
        [],
    ),
    "context and sequence parallel": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {"parallelism_config_cp_size": 2, "parallelism_config_sp_size": 4},
        },
        {"parallel.stage": "zero3", "parallel.cp_size": None},
        ["parallelism_config.parallelism_config_cp_size", "parallelism_config.parallelism_config_sp_size"],
    ),
    "tensor parallel, wrapped by size": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000},
            "parallelism_config": {"parallelism_config_tp_size": 2},
        },
        {"parallel.stage": "zero3", "parallel.tp_size": 2},
        [],
    ),
    "the Megatron-LM guide": (
        {
            **LAUNCH,
            "deepspeed_config": {},
            "distributed_type": "MEGATRON_LM",
            "downcast_bf16": "no",
            "fsdp_config": {},
            "megatron_lm_config": {
                "megatron_lm_gradient_clipping": 1.0,
                "megatron_lm_num_micro_batches": 2,
                "megatron_lm_pp_degree": 2,
                "megatron_lm_recompute_activations": True,
                "megatron_lm_sequence_parallelism": True,
                "megatron_lm_tp_degree": 2,
                "megatron_lm_use_distributed_optimizer": True,
            },
            "mixed_precision": "bf16",
        },
        {
            "parallel.stage": "zero1",
            "parallel.tp_size": 2,
            "parallel.pp_size": 2,
            "train.gradient_accumulation_steps": 2,
            "activation.checkpointing": "selective",
        },
        [],
    ),
    "experts of Megatron-LM": (
        {
            "distributed_type": "MEGATRON_LM",
            "megatron_lm_config": {"megatron_lm_expert_model_parallel_size": 4, "megatron_lm_tp_degree": 1},
        },
        {"parallel.stage": "ddp", "parallel.ep_size": 4},
        [],
    ),
    "an axis of experts, of which accelerate has none": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_ep_size": 4},
        },
        {"parallel.stage": "zero3", "parallel.dp_shard_size": 2, "parallel.ep_size": None},
        ["parallelism_config.parallelism_config_ep_size"],
    ),
    "an axis of experts of one rank": (
        {"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_ep_size": 1}},
        {"parallel.stage": "zero3", "parallel.ep_size": None},
        [],
    ),
    "tensor parallel twice, fp16, Megatron": (
        {
            "distributed_type": "MEGATRON_LM",
            "mixed_precision": "fp16",
            "megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 1},
            "parallelism_config": {"parallelism_config_tp_size": 2},
        },
        {"parallel.stage": "ddp", "parallel.tp_size": None, "parallel.pp_size": None},
        [
            "mixed_precision",
            "megatron_lm_config.megatron_lm_tp_degree",
            "parallelism_config.parallelism_config_tp_size",
        ],
    ),
}
CASES = [("ds.json", name, *case) for name, case in DEEPSPEED.items()]
CASES += [("fsdp.yaml", name, *case) for name, case in ACCELERATE.items()]


def written(folder, file, config):
    path = folder / file
    path.write_text(json.dumps(config) if path.suffix == ".json" else yaml.safe_dump(config, sort_keys=False))
    return path


def leaves(config, prefix=""):
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@pytest.mark.parametrize("file, name, config, wanted, refused", CASES, ids=[case[1] for case in CASES])
def test_translated_or_refused_by_name(file, name, config, wanted, refused, tmp_path):
    settings, entries = translate(written(tmp_path, file, config))
    assert {key: settings.get(key) for key in wanted} == wanted
    assert [entry.key for entry in entries if entry.refused] == refused
    for leaf in leaves(config):  # none in silence: each is an entry, or inside the section that one stands for
        assert any(leaf == entry.key or leaf.startswith(f"{entry.key}.") for entry in entries), leaf
    recipe = parse_recipe(write_recipe(settings, entries, file), file)
    if not refused:
        assert find_stage(recipe.parallel.stage).name == settings["parallel.stage"]


def test_what_is_odd_but_right_gives_a_recipe_that_loads(tmp_path, capsys):
    odd = written(
        tmp_path, "odd.json", {"wandb": {"enabled": True, "project": "ft-\N{ROCKET}"}, "no\nkey": 1, "two": None}
    )
    assert main(["translate", str(odd), "--without-refused"]) == 0
    out, err = capsys.readouterr()
    assert parse_recipe(out, "out").run.project == "ft-\N{ROCKET}" and "# no key = 1: REFUSED" in out
    assert "two: REFUSED, not a key that is known here" in err


def test_accelerate_that_names_a_deepspeed_file(tmp_path):
    written(tmp_path, "ds.json", DEEPSPEED["ZeRO++ tutorial"][0])
    outer = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    settings, entries = translate(written(tmp_path, "outer.yaml", outer))
    assert settings["parallel.stage"] == "zeropp" and not any(entry.refused for entry in entries)


@pytest.mark.parametrize(
    ("said", "tier"), [("false", None), ("No", None), (False, None), ("true", "cpu"), (True, "cpu")]
)
def test_a_quoted_no_is_no(said, tier, tmp_path):
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": said}}
    settings, _ = translate(written(tmp_path, "quoted.yaml", config))
    assert settings.get("offload.params") == tier


def test_a_size_that_is_no_number_of_ranks(tmp_path):
    for value in (-1, 2.5, True, "many"):
        given = {"tensor_parallel": {"autotp_size": value}, "sequence_parallel_size": value}
        given["pipeline"] = {"stages": value, "activation_checkpoint_interval": value}
        given["expert_parallel"] = {"enabled": True, "autoep_size": value}
        _, entries = translate(written(tmp_path, "tp.json", given))
        refused = [entry.key for entry in entries if entry.refused]
        parts = ["pipeline.stages", "pipeline.activation_checkpoint_interval", "expert_parallel.autoep_size"]
        assert refused == ["tensor_parallel.autotp_size", "sequence_parallel_size", *parts], value
    for axis, key in (("tp", "tp_size"), ("cp", "cp_size"), ("sp", "cp_size")):
        three = {"parallelism_config": {f"parallelism_config_{axis}_size": 3}}
        size = translate(written(tmp_path, "axis.yaml", three))[1][0]
        assert (
            size.refused
            and f"data.max_length = 1024 and parallel.{key} = 3: the ranks along tp and cp share" in str(size)
        )


AUTOEP = """enabled autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model
moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm
route_scale score_apply combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm comm_qp_margin
comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k load_balance_coeff
routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts
shared_experts_pattern shared_experts_gate_pattern expert_activation"""


def test_each_field_of_autoep_is_known(tmp_path):
    """Those of AutoEPConfig in DeepSpeed 0.19.8: none is called unknown, and one that is null sets nothing."""
    nothing = dict.fromkeys(AUTOEP.split()) | {"enabled": True, "autoep_size": 2}
    settings, entries = translate(written(tmp_path, "ds.json", {"expert_parallel": nothing}))
    assert settings["parallel.ep_size"] == 2 and not [entry.key for entry in entries if entry.refused]
    of_model = dict.fromkeys(("top_k", "score_func", "score_apply", "routed_scaling_factor"), "auto")
    section = {"expert_parallel": {"enabled": True} | of_model}
    remarks = {entry.key: entry.remark for entry in translate(written(tmp_path, "ds.json", section))[1]}
    assert not any(remarks[f"expert_parallel.{name}"] for name in of_model)  # the model's own, no default of a recipe
    odd = dict.fromkeys(nothing, "odd") | {"enabled": True}
    refused = [entry for entry in translate(written(tmp_path, "ds.json", {"expert_parallel": odd}))[1] if entry.refused]
    assert refused and not [entry.key for entry in refused if "not a key that is known" in entry.remark]


def test_an_axis_that_accelerate_has_not_says_where_experts_go(tmp_path):
    ranks = {"distributed_type": "FSDP", "parallelism_config": {"ep_size": 4}}
    (entry,) = [entry for entry in translate(written(tmp_path, "a.yaml", ranks))[1] if entry.refused]
    assert "accelerate has no such axis; set parallel.ep_size, a part of the ranks that shard" in str(entry)


def test_rows_are_split_by_one_key(tmp_path):
    """Of two, in one file or in that which it names, neither is taken."""
    written(tmp_path, "ds.json", {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 4})
    outer = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    outer["parallelism_config"] = {"parallelism_config_sp_size": 2}
    settings, entries = translate(written(tmp_path, "outer.yaml", outer))
    refused = [entry for entry in entries if entry.refused]
    assert "parallel.cp_size" not in settings and [entry.value for entry in refused] == [2, 4]
    assert all("is parallel.cp_size here, and so is another key" in entry.remark for entry in refused)


def test_what_follows_from_a_stage_follows_from_the_last_word_on_it(tmp_path):
    """A switch that is refused no longer makes its stage, of which the gathers of backward are left out then."""
    zero = {"stage": 2, "zero_quantized_weights": True}
    outer = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    written(tmp_path, "ds.json", {"zero_optimization": zero})
    settings, entries = translate(
        written(tmp_path, "outer.yaml", outer | {"fsdp_config": {"fsdp_backward_prefetch": "BACKWARD_PRE"}})
    )
    assert settings["parallel.stage"] == "zero2" and any(entry.refused for entry in entries)
    assert "parallel.backward_prefetch" not in settings


def test_the_command(tmp_path, capsys):
    good = written(tmp_path, "good.json", DEEPSPEED["ZeRO++ tutorial"][0])
    partly = {"device": "cpu", "ratio": 0.5}
    bad = {"zero_optimization": {"stage": 3, "offload_optimizer": partly, "offload_param": {"device": "tpu"}}}
    bad = written(tmp_path, "bad.json", bad)
    assert main(["translate", str(good), "--out", str(tmp_path / "mine.toml")]) == 0
    assert parse_recipe((tmp_path / "mine.toml").read_text(), "mine").parallel.stage == "zeropp"
    assert main(["translate", str(good), "--out", str(tmp_path / "mine.toml")]) == 2  # exists
    assert main(["translate", str(bad)]) == 2
    out, err = capsys.readouterr()
    assert "2 of its keys are refused: zero_optimization.offload_optimizer" in err
    assert main(["translate", str(bad), "--without-refused"]) == 0
    out, err = capsys.readouterr()
    assert "# zero_optimization.offload_param" in out and parse_recipe(out, "out").parallel.stage == "zero3"


HYBRID = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n"


@pytest.mark.parametrize(
    "file, text, words",
    [
        ("a.json", "{", "not JSON"),
        (
            "a.yaml",
            "a: [",
            "not YAML: while parsing a flow node expected the node content, but found '<stream end>' at line 1",
        ),
        ("a.yaml", "a: 1\nb:\n\t- c", "found character '\\t' that cannot start any token at line 3, column 1"),
        ("a.yaml", "[]", "keys and values"),
        ("a.yaml", "", "at least one"),
        ("absent.json", None, "cannot be read"),
        ("a.json", '{"zero_optimization": {"stage": "three"}}', "zero_optimization.stage"),
        ("a.json", '{"optimizer": "AdamW"}', "optimizer"),
        ("a.json", '{"gradient_clipping": 1e400}', "not JSON: 1e400: not a finite number"),
        ("a.json", '{"gradient_clipping": NaN}', "not JSON: NaN: not a finite number"),
        ("a.json", '{"bf16": {}, "bf16": {"enabled": true}}', "not JSON: bf16: more than once"),
        ("a.json", "[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        ("a.json", '{"train_micro_batch_size_per_gpu": 2.7}', "refused: train_micro_batch_size_per_gpu; "),
        ("a.json", '{"gradient_accumulation_steps": true}', "refused: gradient_accumulation_steps; "),
        ("a.json", '{"zero_optimization": {"stage": true}}', "refused: zero_optimization.stage; "),
        ("a.yaml", "num_machines: 1\nnum_machines: 2", "not YAML: num_machines: more than once"),
        ("a.yaml", "main_process_ip: 2024-01-01\nnobody: 2024-01-01", "refused: nobody; "),
        ("a.yaml", "deepspeed_config: {deepspeed_config_file: [a]}", "deepspeed_config_file = ['a']: must be a path"),
        *(
            ("a.yaml", f"{HYBRID}num_processes: {ranks}\nnum_machines: {machines}", "num_processes / num_machines; ")
            for ranks, machines in ((8, 0), (8, "two"), ("auto", 1), (8, ""), (7, 2))
        ),
    ],
)
def test_bad_files(file, text, words, tmp_path, capsys):
    if text is not None:
        (tmp_path / file).write_text(text)
    assert main(["translate", str(tmp_path / file)]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_stages_that_the_script_says_are_not_shardbooks_default(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1}, "pipeline": {"stages": "auto"}}')
    settings, entries = translate(path)
    [said] = [entry.remark for entry in entries if entry.key == "pipeline.stages"]
    assert "set parallel.pp_size to the num_stages" in said and "parallel.pp_size" not in settings


def test_an_axis_that_an_error_only_names_as_a_way_out_is_kept():
    size, others = {"parallel.pp_size": 1}, {"parallel.pipeline_schedule": "interleaved", "parallel.pipeline_chunks": 2}
    entries = [Entry("pipeline.stages", 1, size, "")]
    settings = {"train.epochs": 1} | size | others
    kept = dict(settings)
    with pytest.raises(RecipeError, match=r"there is no pipeline; set parallel.pp_size, or leave it out"):
        parse_recipe(write_recipe(settings, [], ""), "")
    drop_refused(settings, entries)
    assert settings == kept and not entries[0].refused
    settings = {"train.epochs": 1, "parallel.pp_size": 2, "parallel.stage": "zeropp"}  # what it is about
    entries = [Entry("pipeline.stages", 2, {"parallel.pp_size": 2}, "")]
    drop_refused(settings, entries)
    assert "parallel.pp_size" not in settings and entries[0].refused


def said_of(path):
    return {entry.key: entry for entry in translate(path)[1]}


def test_rare_logging_is_said(tmp_path):
    for steps, word in ((10, ""), (2000, "once in 2000 steps: set train.logging_steps=10")):
        entry = said_of(written(tmp_path, "ds.json", {"steps_per_print": steps}))["steps_per_print"]
        assert (
            entry.settings == {"train.logging_steps": steps}
            and word in entry.remark
            and bool(word) == bool(entry.remark)
        )


def test_auto_is_what_transformers_puts_there(tmp_path):
    settings, entries = translate(written(tmp_path, "ds.json", DEEPSPEED["transformers, zero 2"][0]))
    wanted = {
        "train.per_device_train_batch_size": 8,
        "train.gradient_accumulation_steps": 1,
        "optim.max_grad_norm": 1.0,
        "optim.learning_rate": 5e-5,
        "optim.betas": [0.9, 0.999],
        "optim.weight_decay": 0.0,
        "optim.warmup_steps": 0,
    }
    assert {key: settings.get(key) for key in wanted} == wanted
    said = {entry.key: str(entry) for entry in entries}
    assert "lr is auto: 5e-05 in transformers" in said["optimizer"]
    assert said["gradient_clipping"].endswith("max_grad_norm = 1.0; auto: the default of transformers' Trainer")
    assert said["bf16"].endswith("auto: Shardbook's default stays, bf16 on a GPU")
    long = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    assert "total_num_steps is auto, so" in said_of(written(tmp_path, "long.json", long))["scheduler"].remark
    defaults = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    names = {
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_clipping": "max_grad_norm",
        "lr": "learning_rate",
        "eps": "adam_epsilon",
        "warmup_max_lr": "learning_rate",
        "warmup_num_steps": "warmup_steps",
    }
    assert AUTO["betas"] == [defaults.adam_beta1, defaults.adam_beta2]
    for name in AUTO.keys() - {"betas", "warmup_min_lr"}:
        assert AUTO[name] == getattr(defaults, names.get(name, name)), name


def test_what_needs_nothing_is_one_line(tmp_path, capsys):
    assert main(["translate", str(written(tmp_path, "fsdp.yaml", ACCELERATE["fsdp 2"][0]))]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nothing to set")]
    quiet = [*LAUNCH, *(f"fsdp_config.fsdp_{name}" for name in ("version", "auto_wrap_policy", "state_dict_type"))]
    assert line == f"{NOTHING}: {', '.join(quiet)}"


def test_bf16_warns_of_a_cpu(tmp_path):
    for enabled in (True, False):
        entries = said_of(written(tmp_path, "a.json", {"bf16": {"enabled": enabled}}))
        assert ("(bf16)" in entries and "on a CPU" in entries["(bf16)"].remark) == enabled
    entries = said_of(written(tmp_path, "a.yaml", {"mixed_precision": "bf16"}))
    assert "there set precision.params=fp32" in entries["(bf16)"].remark


SWITCHES = [({name: {"enabled": word}}, name, f"enabled = {word!r}: must be true or false")
            for name, word in (("bf16", "yes"), ("fp16", "on"), ("wandb", "no"))]  # fmt: skip
TIERS = [({"zero_optimization": {"stage": 3, f"offload_{what}": value}}, f"zero_optimization.offload_{what}",
          "must be a section: keys and values")
         for what, value in (("optimizer", "cpu"), ("param", True), ("optimizer", 5), ("param", ["cpu"]))]  # fmt: skip


@pytest.mark.parametrize(("config", "key", "said"), [*SWITCHES, *TIERS])
def test_what_is_no_section_or_no_switch_is_refused_in_one_line(config, key, said, tmp_path, capsys):
    assert main(["translate", str(written(tmp_path, "ds.json", config))]) == 2
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if "REFUSED" in line]
    assert line.startswith(f"{key} = ") and line.endswith(f": REFUSED, {said}")
    assert lines[-1].endswith(f"1 of its keys are refused: {key}; --without-refused leaves them out")
