"""One rank of one contender of bench-peers: built, its first step taken, then a step each time that it is told to.

    python tests/bench/peer_loops.py NAME FOLDER CONNECTION

FOLDER holds what peers.py prepared: settings.json, rows.pt. CONNECTION is the descriptor of a pipe to peers.py: a
message after each step, and one answer that lets the next begin; between the two this process is blocked in a read.
Ours is `shardbook.train` itself, whole, seen from outside as watch.py sees it: nothing of it is copied here. So what
it does between steps of its optimizer is in its time, and what changes in it needs no change here.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from peer_report import ON_FOUR_RANKS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ADDRESSED = {"gather", "scatter_add_", "index", "index_put", "index_put_", "embedding", "nll_loss_forward"}
UNTOUCHED = ("empty", "new_empty", "resize", "set_", "_local_scalar", "_unsafe_view")


class Work(TorchDispatchMode):
    """What operations do while it is on: multiply-adds of products, twice; bytes that all others but views take in and
    give back; bytes that collectives send. Of a DTensor, the part that is here; of what is only looked up in, or added
    to in places, what goes in or out."""

    def __init__(self) -> None:
        super().__init__()
        self.done = {"products": 0, "memory": 0, "sent": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made, name = function(*args, **(kwargs or {})), function._opname
        is_view = any(each.alias_info and not each.alias_info.is_write for each in function._schema.returns)
        if function._overloadpacket in flop_registry:
            self.done["products"] += flop_registry[function._overloadpacket](*args, **(kwargs or {}), out_val=made)
        elif not is_view and not name.startswith(UNTOUCHED):
            leaves = tree_leaves((args, kwargs, made))
            if "c10d" in function.namespace:
                self.done["sent"] += sent_bytes(name, leaves)
                return made
            sizes = [local_bytes(value) for value in leaves]
            if name in ADDRESSED:
                sizes = [size for size in sizes if size < max(sizes)]
            self.done["memory"] += sum(sizes)
        return made


def sent_bytes(name: str, leaves: list) -> int:
    """What a rank of a ring of all N of a group sends for the collective `name`, whose tensors are among `leaves`:
    (N - 1) / N of the whole for an all-gather or a reduce-scatter, twice that for an all-reduce, and in the ranks' mean
    as much as for a gather for a broadcast or a reduction to one rank."""
    groups = [
        dist.ProcessGroup.unbox(leaf) for leaf in leaves if isinstance(leaf, torch.ScriptObject) and is_group(leaf)
    ]
    ranks, plain = (groups[0].size() if groups else dist.get_world_size()), name.replace("_", "")
    here = sum({id(value): local_bytes(value) for value in leaves}.values())  # outputs are also among the arguments
    if "gather" in plain or "scatter" in plain:
        return here * (ranks - 1) // (ranks + 1)  # the whole and a part are here
    if plain.startswith(("allreduce", "broadcast", "reduce")):
        return here * (ranks - 1) // ranks * (2 if plain.startswith("all") else 1)
    if plain.startswith("alltoall"):
        return here // 2 * (ranks - 1) // ranks  # what goes in and what comes out
    if plain.startswith(("wait", "wrap", "barrier")):
        return 0
    raise NotImplementedError(name)


def is_group(leaf: torch.ScriptObject) -> bool:
    return "ProcessGroup" in leaf._type().qualified_name()


def local_bytes(value) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    part = getattr(value, "_local_tensor", value)
    return part.numel() * part.element_size()


RECIPE = "smollm2-135m-fsdp"
STAGES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
HYBRID = (2, 2)  # replicas, and shards of each
PACKED_LENGTH = 256  # of the rows that hold whole exchanges


@dataclass
class Bench:
    """What a contender is given. `losses`: of this rank's rows, one a step."""

    name: str
    folder: Path
    connection: Connection
    settings: dict
    rank: int = field(default_factory=lambda: int(os.environ["RANK"]))
    losses: list[float] = field(default_factory=list)
    done: int = 0
    work: Work = field(default_factory=Work)

    def rows(self) -> torch.Tensor:
        """[steps, batch, length] int64: this rank's, in the order in which our loader gives them."""
        rows = torch.load(self.folder / "rows.pt")  # of a step, rank after rank
        return rows.unflatten(1, (-1, self.settings["batch"]))[:, self.rank]

    def step_done(self, *_) -> None:
        """Say so, and wait to be told to go on; after the last step only say so."""
        self.done += 1
        if self.done == self.settings["steps"] and "counts" in self.settings:
            self.work.__exit__(None, None, None)
        self.connection.send("step")
        if self.done < self.settings["steps"]:
            self.connection.recv()
        if self.done == self.settings["steps"] - 1 and "counts" in self.settings:
            self.work.__enter__()

    def load_model(self, **named):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.settings["model"], dtype=torch.float32, **named)
        model.config.use_cache = False
        return model.train()

    def build_optimizer(self, model) -> torch.optim.Optimizer:
        """As ours: matrices decay, vectors do not."""
        asked = self.settings["optim"]
        decays = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decays, "weight_decay": asked["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            groups, lr=asked["learning_rate"], betas=tuple(asked["betas"]), eps=asked["eps"], fused=True
        )

    def loop(self, model) -> None:
        """The loop that one would write: the ranks' mean gradient, since all have as many tokens."""
        optimizer = self.build_optimizer(model)
        for ids in self.rows():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.settings["optim"]["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append(loss.item())
            self.step_done()


def recipe_words(settings: dict, folder: Path, name: str, rows: dict) -> list[str]:
    """The command line of our run `name`; `rows`: the keys of stage and data."""
    fixed = {
        "model.path": settings["model"],
        "data.eval_size": 0,
        "generate.steps": 0,
        **{f"optim.{key}": value for key, value in settings["optim"].items()},
        "optim.lr_scheduler_type": "constant",
        "optim.warmup_steps": 0,
        "train.steps": settings["steps"],
        "train.logging_steps": 1,
        "train.export": "false",
        "run.dir": folder / "runs",
        "run.name": name,
        "run.report_to": "none",
        # while the others step this one stands still, and is not lost
        "run.lost_seconds": 36_000,
        "run.hang_seconds": 36_000,
    }
    return [RECIPE, *(f"{key}={value}" for key, value in (fixed | rows).items())]


def full_rows(settings: dict, folder: Path, stage: str) -> dict:
    axes = dict(zip(("dp_replicate_size", "dp_shard_size"), HYBRID, strict=True)) if stage == "hsdp" else {}
    return {
        "parallel.stage": stage,
        **{f"parallel.{axis}": size for axis, size in axes.items()},
        "data.train": folder / "full.jsonl",
        "data.max_length": settings["length"],
        "data.packing": "false",  # one document fills a row: what packing does is measured apart
        "train.per_device_train_batch_size": settings["batch"],
    }


def exchanges(settings: dict, folder: Path, packing: bool) -> dict:
    """ChitChat's exchanges, about as many in a step of either kind of rows: the same batch, packed or padded. A packed
    row holds 5.3 of them; padded they need activations for four times as many tokens, so both recompute theirs."""
    return {
        "parallel.stage": "zero3",
        "data.train": folder / "exchanges.jsonl",
        "data.max_length": PACKED_LENGTH,
        "data.packing": str(packing).lower(),
        "data.skip_untrainable": "true",
        "train.per_device_train_batch_size": settings["batch"] * (1 if packing else 5),
        "activation.checkpointing": "full",
    }


def run_ours(bench: Bench, rows: Callable[[dict, Path], dict]) -> dict:
    """A run of `shardbook.train`, cut after each step of its optimizer."""
    from shardbook.train import main

    register_optimizer_step_post_hook(bench.step_done)
    code = main(recipe_words(bench.settings, bench.folder, bench.name, rows(bench.settings, bench.folder)))
    if code:
        sys.exit(code)
    if bench.rank:  # rank 0 writes the file, and may not have ended yet
        return {"losses": None}
    file = bench.folder / "runs" / bench.name / "metrics.jsonl"
    logged = [json.loads(line) for line in file.read_text().splitlines()]
    bench.losses = [row["train/loss"] for row in logged]
    total = [0, *(row["train/tokens"] for row in logged)]
    return {"trained_tokens": [after - before for before, after in itertools.pairwise(total)]}


def run_ddp(bench: Bench) -> None:
    dist.init_process_group("gloo")
    bench.loop(DistributedDataParallel(bench.load_model(), gradient_as_bucket_view=True))


def run_fully_shard(bench: Bench, reshards: bool, sizes: tuple[int, ...] = (2,)) -> None:
    """`sizes`: of the mesh: shards, behind replicas where there are any."""
    dist.init_process_group("gloo")
    names = ("replicas", "shards")[-len(sizes) :]
    model, mesh = bench.load_model(), init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    root = None if reshards else False  # torch's own: the root stays gathered for its backward
    bench.loop(fully_shard(model, mesh=mesh, reshard_after_forward=root))


def run_shard_on_load(bench: Bench) -> None:
    """Where the ranks do not divide the vocabulary, 5.23 lets tied embedding and head drift apart from the first step:
    the tiny model's losses are others."""
    from transformers.distributed import DistributedConfig

    bench.loop(bench.load_model(distributed_config=DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))))


def run_trainer(bench: Bench) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_end(self, *_, **__):
            bench.step_done()

    class Noted(Trainer):
        def training_step(self, *anything, **named):
            loss = super().training_step(*anything, **named)
            bench.losses.append(loss.item())
            return loss

    asked, settings = bench.settings["optim"], bench.settings
    arguments = TrainingArguments(
        output_dir=str(bench.folder / "trainer"),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=settings["batch"],
        max_steps=settings["steps"],
        train_sampling_strategy="sequential",
        optim="adamw_torch_fused",
        learning_rate=asked["learning_rate"],
        adam_beta1=asked["betas"][0],
        adam_beta2=asked["betas"][1],
        adam_epsilon=asked["eps"],
        weight_decay=asked["weight_decay"],
        max_grad_norm=asked["max_grad_norm"],
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # batch after batch, rank after rank, is how the Trainer deals them out
    ids = torch.load(bench.folder / "rows.pt").flatten(0, 1)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    Noted(model=bench.load_model(), args=arguments, train_dataset=rows, callbacks=[Steps()]).train()


def run_deepspeed(bench: Bench, stage: int) -> None:
    import deepspeed

    # its collectives through shared memory are compiled when first used, which takes a compiler and minutes
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = bench.load_model()
    config = {
        "train_micro_batch_size_per_gpu": bench.settings["batch"],
        "gradient_clipping": bench.settings["optim"]["max_grad_norm"],
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,  # torch's fused AdamW, as all others have
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=bench.build_optimizer(model), config=config)
    for ids in bench.rows():
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        bench.losses.append(loss.item())
        bench.step_done()


CONTENDERS: dict[str, Callable[[Bench], dict | None]] = {
    **{stage: partial(run_ours, rows=partial(full_rows, stage=stage)) for stage in STAGES},
    "packed": partial(run_ours, rows=partial(exchanges, packing=True)),
    "padded": partial(run_ours, rows=partial(exchanges, packing=False)),
    "bare DDP": run_ddp,
    "bare fully_shard, gathered": partial(run_fully_shard, reshards=False),
    "bare fully_shard": partial(run_fully_shard, reshards=True),
    "bare fully_shard, hybrid": partial(run_fully_shard, reshards=True, sizes=HYBRID),
    "HF Trainer": run_trainer,
    "transformers, sharded on load": run_shard_on_load,
    "DeepSpeed ZeRO-1": partial(run_deepspeed, stage=1),
    "DeepSpeed ZeRO-2": partial(run_deepspeed, stage=2),
    "DeepSpeed ZeRO-3": partial(run_deepspeed, stage=3),
}


def main(
    name: str,
    folder: str,
    descriptor: str,
    contenders: dict[str, Callable[[Bench], dict | None]] = CONTENDERS,
    work: type[Work] = Work,
) -> None:
    connection = Connection(int(descriptor))
    settings = json.loads((Path(folder) / "settings.json").read_text())
    if name in ON_FOUR_RANKS:
        settings["model"] = settings["model_on_four_ranks"]
        settings["batch"] = settings["batch"] * settings["ranks"] // 4  # as many rows in a step
    bench = Bench(name, Path(folder), connection, settings, work=work())
    facts = contenders[name](bench) or {}
    # getrusage would give the parent's, where that is larger
    status = Path("/proc/self/status").read_text().splitlines()
    peak = 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    connection.send({"losses": bench.losses, "peak_resident_bytes": peak, "work": bench.work.done} | facts)
    sys.stdout.flush()
    os._exit(0)  # what native threads do at an interpreter's end is not measured


if __name__ == "__main__":
    main(*sys.argv[1:])
