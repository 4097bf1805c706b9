"""What bench-gpu measures: its cases in order of weight, their rows, what each must compute, and whether it fits.

Pure of a GPU: everything here runs on a laptop.
"""

import json
import random
import re
import string
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import get_args

import torch

from shardbook.model.attention import KERNELS
from shardbook.model.causal_lm import build_model
from shardbook.model.families import load_config
from shardbook.parallel.layout import build_layout
from shardbook.plan.formulas import predict_gathered_peak, predict_resident
from shardbook.plan.peak import predict_peak
from shardbook.recipe import Optim, load_recipe, resolve_precision

HERE = Path(__file__).parent
SHAPES = {"1b": "llama-3.2-1b", "3b": "llama-3.2-3b", "8b": "llama-3.1-8b", "moe": "moe-2.7b"}
DENSE = ("1b", "3b", "8b")
ADAPTERS = {
    "lora": ("lora.r=16", "lora.lora_alpha=32"),
    "qlora": ("lora.r=16", "lora.lora_alpha=32", "model.load_in_4bit=true"),
}
OFFLOAD = tuple(f"offload.{what}=cpu" for what in ("optimizer", "params", "activations"))
# Loops that one would write without Shardbook: bare_loop.py, and those of gpu_loops.py
LOOPS = {"bare": "bare loop", "fsdp2": "fully_shard", "trainer": "Trainer", "peft": "peft"}
OPTIMIZERS = get_args(Optim.model_fields["name"].annotation)


@dataclass(frozen=True)
class Case:
    """One measurement. `rows`: `packed` (documents of different lengths) or `whole` (one document fills a row)."""

    shape: str
    length: int
    batch: int
    rows: str = "packed"
    checkpointing: str = "none"
    loop: str = "shardbook"  # or one of LOOPS
    stage: str = "zero3"
    master: str = "fp32"
    optimizer: str = "adamw"
    attention: str = "auto"
    compiled: bool = True
    adapter: str = ""  # one of ADAPTERS
    offload: bool = False  # of everything, to the host
    logging_steps: int = 3
    chunk: int = 0  # train.loss_chunk_tokens, 0: the recipe's default
    saves: str = ""  # train.async_save, of a checkpoint every fifth step; empty: none is saved
    seconds: int = field(
        default=75, compare=False
    )  # after which it is ended: start, compilation, twelve steps and a profile

    @property
    def name(self) -> str:
        odd = []
        for each in fields(Case)[6:-1]:
            if (value := getattr(self, each.name)) != each.default:
                odd.append(value if each.name == "adapter" else f"{each.name}={value}")
        loop = [LOOPS[self.loop]] if self.loop in LOOPS else []
        return " ".join([self.shape, f"{self.batch}x{self.length}", self.rows, self.checkpointing, *odd, *loop])

    @property
    def run_name(self) -> str:
        return re.sub(r"\W+", "-", self.name)

    @property
    def rows_file(self) -> str:
        return f"{self.rows}-{self.length}.jsonl"

    def shape_folder(self, folder: Path) -> Path:
        return HERE / "shapes" / SHAPES[self.shape] if self.shape in SHAPES else folder / self.shape

    def overrides(self, folder: Path) -> list[str]:
        """The recipe's keys. Logged every three steps, so that a row comes before the profiled ones; with offload every
        step, for a row has what the host did since the last one."""
        compiles = self.compiled and torch.cuda.is_available()
        return [
            f"model.path={self.shape_folder(folder)}",
            f"model.tokenizer={folder}/tokenizer",
            "model.init=random",
            f"data.train={folder}/{self.rows_file}",
            f"data.max_length={self.length}",
            f"data.packing={str(self.rows == 'packed').lower()}",
            f"parallel.stage={self.stage}",
            f"precision.master={self.master}",
            f"activation.checkpointing={self.checkpointing}",
            f"model.attention={self.attention}",
            f"optim.name={self.optimizer}",
            f"train.per_device_train_batch_size={self.batch}",
            f"train.compile={str(compiles).lower()}",
            f"train.logging_steps={1 if self.offload else self.logging_steps}",
            *([f"train.loss_chunk_tokens={self.chunk}"] if self.chunk else []),
            *(
                [f"train.async_save={self.saves}", "train.save_steps=5", "train.save_total_limit=1"]
                if self.saves
                else []
            ),
            *ADAPTERS.get(self.adapter, ()),
            *(OFFLOAD if self.offload else ()),
            "train.export=false",
            f"run.dir={folder}/runs",
            f"run.name={self.run_name}",
            "run.report_to=none",
        ]

    def command(self, folder: Path, out: Path, steps: int) -> list[str]:
        """What the interpreter runs."""
        if self.loop in LOOPS:
            data = [f"{folder}/tokenizer", f"{folder}/{self.rows_file}", str(self.length), str(self.batch)]
            given = [str(out), str(steps), f"{self.shape_folder(folder)}", *data]
            if self.loop == "bare":
                return [f"{HERE}/bare_loop.py", *given, self.checkpointing]
            return [f"{HERE}/gpu_loops.py", self.loop, *given]
        return [f"{HERE}/one_run.py", str(out), str(steps), f"{folder}/bench.toml", *self.overrides(folder)]


def cases_of(cuda: bool) -> list[Case]:
    """In order of what a next call would tell, by docs/benchmarks/gpu-first-touch.md: what the time does not suffice
    for is at the end."""
    if not cuda:
        whole = [Case("tiny", 128, 2, "whole", loop=loop) for loop in ("shardbook", "bare")]
        return [Case("tiny", 128, 2), *whole]
    small = {"master": "bf16", "optimizer": "adamw_bf16"}
    first = [  # each beside what it is compared with
        Case("1b", 4096, 2, "whole"),
        Case("1b", 4096, 2, "whole", loop="fsdp2"),
        Case("moe", 8192, 1, checkpointing="full"),
        Case("8b", 8192, 1, checkpointing="selective", adapter="lora"),
        Case("1b", 4096, 2, "whole", loop="trainer"),
        Case("8b", 4096, 1, checkpointing="selective", adapter="qlora"),
        Case("8b", 8192, 1, checkpointing="full", seconds=100, **small),
        Case("1b", 4096, 4),
        Case("8b", 8192, 1, checkpointing="full", seconds=100),
        Case("1b", 4096, 4, compiled=False),
        Case("3b", 8192, 1, checkpointing="full", offload=True, seconds=110),
        Case("1b", 4096, 4, chunk=4096),
        Case("1b", 4096, 4, logging_steps=1),
        Case("1b", 4096, 4, stage="zero2"),
        Case("1b", 4096, 4, stage="ddp"),
        Case("1b", 4096, 4, attention="sdpa"),  # a dense mask for the same rows
        Case("8b", 4096, 1, checkpointing="selective", **small),
        *(
            Case("1b", 65_536, 1, "whole", "full", attention=kernel, seconds=100)
            for kernel in ("varlen", "sdpa", "flex")
        ),
        *(Case("1b", 4096, 4, saves=mode, seconds=100) for mode in ("false", "true", "wait")),
        Case("3b", 8192, 1, checkpointing="selective"),
        Case("8b", 8192, 1, "whole", "selective", adapter="lora"),
        Case("8b", 8192, 1, "whole", "full", loop="peft"),
        Case("8b", 8192, 1, checkpointing="full", attention="sdpa", **small),
        Case("8b", 8192, 1, checkpointing="selective", **small),
        Case("1b", 4096, 2, "whole", loop="bare"),
        Case("3b", 8192, 1, "whole", "full"),
        Case("3b", 8192, 1, "whole", "full", loop="bare"),
    ]
    others = [
        Case(shape, length, batch, checkpointing=kind, optimizer=optimizer)
        for optimizer in OPTIMIZERS
        if optimizer != "adamw"
        for shape, length, batch, kind in (("8b", 8192, 1, "full"), ("1b", 4096, 4, "none"))
    ]
    batches = {"1b": 16_384, "3b": 8192, "8b": 8192}  # tokens of a micro-batch
    grid = [
        Case(shape, length, batches[shape] // length, checkpointing=kind)
        for shape in DENSE
        for length in (8192, 4096)
        for kind in ("selective", "none", "full")
    ]
    bare = [Case("8b", 8192, 1, "whole", "full"), Case("8b", 8192, 1, "whole", "full", loop="bare")]
    return list(dict.fromkeys([*first, *others, *grid, *bare]))


def rehearsed() -> list[Case]:
    """Without a GPU: each loop, and each kind of case whose command differs."""
    loops = [Case("tiny", 128, 2, "whole", loop=loop) for loop in ("fsdp2", "trainer", "peft")]
    adapted = [Case("tiny", 128, 2, checkpointing="selective", adapter=adapter) for adapter in ADAPTERS]
    return [*cases_of(cuda=False), *loops, *adapted, Case("tiny", 128, 2, checkpointing="full", offload=True)]


def plan_cases(cuda: bool) -> list[Case]:
    """Whose peaks are held against the plan's, which knows of no compiler."""
    if not cuda:
        return [Case("tiny", 128, 2, compiled=False)]
    small = {"master": "bf16", "optimizer": "adamw_bf16"}
    cases = [
        Case("1b", 4096, 4),
        Case("1b", 4096, 4, checkpointing="full"),
        Case("1b", 8192, 2, checkpointing="selective", stage="ddp"),
        Case("3b", 8192, 1, checkpointing="selective"),
        Case("8b", 8192, 1, checkpointing="full", **small),
        Case("8b", 4096, 1, checkpointing="selective", **small),
    ]
    return [replace(case, compiled=False) for case in cases]


def predicted_peak(case: Case, folder: Path, device: str) -> int:
    """Bytes, by the plan's formula, which counts varlen attention."""
    recipe = resolve_precision(load_recipe(folder / "bench.toml", case.overrides(folder)), device)
    config = load_config(recipe.model, case.shape_folder(folder), case.length)
    attention = KERNELS["varlen" if device == "cuda" else "sdpa"]
    model = build_model(config, recipe.at_rest, recipe.train.loss_chunk_tokens, attention)
    layout = build_layout(recipe.parallel, recipe.precision, model, model.parts, model.blocks, 1, 1)
    return predict_peak(layout, config, recipe).total


def write_documents(path: Path, kind: str, length: int, tokens: int) -> None:
    """Texts of random letters (seed 0), a token a letter: `whole` ones fill a row and are cut to it; `packed` ones have
    a sixteenth to a third of it. At least `tokens` in all."""
    dice, written, lines = random.Random(0), 0, []
    while written < tokens:
        count = length if kind == "whole" else dice.randint(length // 16, length // 3)
        lines.append(json.dumps({"text": "".join(dice.choices(string.ascii_lowercase + " ", k=count - 1)) + "."}))
        written += count
    path.write_text("\n".join(lines) + "\n")


def mean_attended(path: Path, length: int) -> float:
    """The length of a document as attention pays for it: sum of squares over sum, each with its end token."""
    counts = [min(length, len(json.loads(line)["text"]) + 1) for line in path.read_text().splitlines()]
    return sum(count**2 for count in counts) / sum(counts)


def model_flops(config: dict, attended: float) -> float:
    """To train on one token: 6 a matrix parameter, and causal attention within documents of `attended` tokens (PaLM,
    arXiv 2204.02311, appendix B, halved). Written out here, so that both loops are held to one count."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    block = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config["intermediate_size"]
    return 6 * (layers * block + config["vocab_size"] * hidden) + 6 * layers * queries * attended


def kept_values(config: dict, checkpointing: str) -> int:
    """Least number of values that the blocks keep a token from forward to backward: `full` a block's input, `selective`
    the products' outputs and attention's too. `none` keeps more than selective; this is what it keeps at least."""
    hidden = config["hidden_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    products = 2 * queries + 2 * keys + hidden + 2 * config["intermediate_size"]
    return config["num_hidden_layers"] * (hidden if checkpointing == "full" else hidden + products)


def left_out(case: Case, folder: Path, device: str, memory_bytes: int | None) -> str | None:
    """Why the case cannot fit, by the formulas for what a rank keeps and gathers; None: it may."""
    # the formulas below are of full training of a model whose every parameter multiplies
    if memory_bytes is None or case.adapter or case.offload or case.loop == "peft" or case.shape not in DENSE:
        return None
    recipe = load_recipe(folder / "bench.toml", case.overrides(folder))
    recipe = resolve_precision(recipe, device)
    shape = case.shape_folder(folder)
    model = build_model(load_config(recipe.model, shape, case.length), case.master, recipe.train.loss_chunk_tokens)
    layout = build_layout(recipe.parallel, recipe.precision, model, model.parts, model.blocks, 1, 1)
    state = predict_gathered_peak(layout) + predict_resident(layout, 0, case.optimizer).total_bytes
    kept = kept_values(json.loads((shape / "config.json").read_text()), case.checkpointing)
    activations = kept * case.batch * case.length * layout.dtype("params").itemsize
    if state + activations <= memory_bytes:
        return None
    parts = f"{state / 1e9:.0f} of state and gathered units, {activations / 1e9:.0f} of activations"
    return f"needs {(state + activations) / 1e9:.0f} GB at least ({parts}), the device has {memory_bytes / 1e9:.0f}"
