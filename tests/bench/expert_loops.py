"""One rank of one contender of bench-experts: a mixture of experts under zero3 with and without expert parallel, and
under transformers' own expert parallel in the loop that its users write.

    python tests/bench/expert_loops.py NAME FOLDER CONNECTION

Arguments and messages are those of peer_loops.py. A model of transformers' has gradients of two meshes: experts lie
along ep, all else along fsdp. clip_grad_norm_ does not go across meshes, so the loop has a norm for each, as that of
transformers' Trainer.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from peer_loops import Bench, Work, full_rows, local_bytes, main, run_ours
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import register_flop_formula

RANKS = 2
OPS = {  # a word of an operation's name, without underscores -> as shardbook.comm.ledger calls it
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}


@register_flop_formula(torch.ops.aten._grouped_mm, get_raw=True)
def grouped_flops(rows, other, *args, out_val=None, **kwargs) -> int:
    """The products of all experts together: of rows [rows, K] with weights [experts, K, N], or, for the gradient of
    weights, of [K, rows] with [rows, N]."""
    return 2 * rows.numel() * other.shape[-1]


class Payload(Work):
    """Counts what Work counts, and payload bytes of collectives by operation, whoever calls them: c10d's own and
    functional ones, but for those inside an operation of DTensors, which here are sums of norms. Payload is what the
    ledger says it is: the full tensor of a gather or a reduce-scatter, else what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.done["payload"] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made, plain = super().__torch_dispatch__(function, types, args, kwargs), function._opname.replace("_", "")
        if "c10d" in function.namespace and not plain.startswith(("wait", "wrap", "barrier")):
            op = next(op for word, op in OPS.items() if word in plain)
            sizes = [local_bytes(value) for value in tree_leaves((args, kwargs, made))]
            given = args[1] if function.namespace == "c10d" and op == "all_to_all" else args[0]  # there after outputs
            payload = sum(map(local_bytes, tree_leaves(given))) if op in ("all_to_all", "all_reduce") else max(sizes)
            self.done["payload"][op] = self.done["payload"].get(op, 0) + payload
        return made


def run_zero3(bench: Bench, ep_size: int) -> dict:
    """A run of `shardbook.train`. Of rank 0 also the payload that the run's own ledger counts in its first step."""
    said = run_ours(
        bench, lambda settings, folder: full_rows(settings, folder, "zero3") | {"parallel.ep_size": ep_size}
    )
    if not bench.rank:
        file = bench.folder / "runs" / bench.name / "metrics.jsonl"
        logged = json.loads(file.read_text().splitlines()[0])
        said["ledger"] = {op: logged.get(f"comm/{op}_bytes", 0) for op in OPS.values() if op != "broadcast"}
    return said


def run_transformers(bench: Bench, **sizes: int | str | dict) -> None:
    """Shards on load, by transformers' own plan. With tp_size both ranks have the rows of both."""
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig

    model = bench.load_model(distributed_config=DistributedConfig(**sizes))
    assert dist.get_backend() == "gloo"
    rows = bench.rows()
    if "tp_size" in sizes:
        rows = torch.load(bench.folder / "rows.pt")
    optimizer = bench.build_optimizer(model)
    for ids in rows[: bench.settings["steps"]]:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_gradients(model, bench.settings["optim"]["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        bench.losses.append(loss.item())
        bench.step_done()


def group_by_mesh(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Returns `parameters` by the mesh that they lie on; plain tensors are a group of their own."""
    groups = defaultdict(list)
    for parameter in parameters:
        groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return list(groups.values())


def clip_gradients(model: torch.nn.Module, max_norm: float) -> None:
    groups = group_by_mesh([parameter for parameter in model.parameters() if parameter.grad is not None])
    norms = [get_total_norm([parameter.grad for parameter in group]) for group in groups]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total)


CONTENDERS: dict[str, Callable[[Bench], dict | None]] = {
    "zero3-ep2": partial(run_zero3, ep_size=2),
    "zero3": partial(run_zero3, ep_size=1),
    "transformers, fsdp 2, ep 2": partial(run_transformers, fsdp_size=2, ep_size=2),
    "transformers, fsdp 2": partial(run_transformers, fsdp_size=2),
    "transformers, tp 2, ep 2": partial(run_transformers, tp_size=2, ep_size=2),
    "transformers, tp 2, ep 2, experts alone": partial(run_transformers, tp_size=2, ep_size=2, tp_plan={}),
}

if __name__ == "__main__":
    name, folder, descriptor = sys.argv[1:]
    main(name, folder, descriptor, CONTENDERS, Payload)
