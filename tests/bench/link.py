"""ZeRO++ on a real link: two network namespaces as nodes, two ranks each, a veth pair between them limited with tc.

For zero3, hsdp and the switches of ZeRO++: seconds a step, bytes by the interface itself and by the ledger, at several
rates, interleaved in one run, medians. Writes docs/benchmarks/link.json.

    make bench-link                                # needs root, and iproute2's ip and tc
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from nodes import ADDRESSES, SPACES, build_link, remove_link, why_not

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "benchmarks" / "link.json"
RATES = {"unlimited": None, "1gbit": "1gbit", "200mbit": "200mbit", "50mbit": "50mbit"}
ROUNDS = {"unlimited": 7, "1gbit": 7, "200mbit": 3, "50mbit": 3}  # odd: a median is a measurement
VARIANTS = {
    "zero3": {"stage": "zero3"},
    "hsdp": {"stage": "hsdp", "dp_replicate_size": 2, "dp_shard_size": 2},
    "qwZ": {"stage": "zeropp", "quantize_weights": 8},
    "qwZ+hpZ": {"stage": "zeropp", "quantize_weights": 8, "secondary_shard": "node"},
    "zeropp": {
        "stage": "zeropp",
        "quantize_weights": 8,
        "secondary_shard": "node",
        "quantize_gradients": [8, 4],
    },
}
SHAPE = {  # a Llama of 21 million parameters
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
TOKENS = 64  # of one rank in a step: the link is what is measured


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=0, help="of each rate; 0: more of the fast ones, as in ROUNDS")
    parser.add_argument("--rates", nargs="*", choices=RATES, default=list(RATES))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        return rank_main(asked)
    if why := why_not():
        print(f"bench-link needs root, ip and tc: {why}", file=sys.stderr)
        return 2
    build_link()
    try:
        nodes = [subprocess.Popen(launch(node, asked), cwd=ROOT) for node in (0, 1)]
        return wait_for(nodes)
    finally:
        remove_link()


def wait_for(nodes: list[subprocess.Popen]) -> int:
    """The first exit code that is not 0, with the others ended; 0 where all ended well."""
    while any(node.poll() is None for node in nodes):
        if code := next((node.returncode for node in nodes if node.returncode), 0):
            for node in nodes:
                node.kill()
                node.wait()
            return abs(code)
        time.sleep(0.5)
    return abs(next((node.returncode for node in nodes if node.returncode), 0))


def launch(node: int, asked: argparse.Namespace) -> list[str]:
    return [
        *("ip", "netns", "exec", SPACES[node], "env", f"GLOO_SOCKET_IFNAME=link{node}", "OMP_NUM_THREADS=1"),
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(node)),
        *("--nproc_per_node", "2", "--master_addr", ADDRESSES[0], "--master_port", "29577"),
        *(str(Path(__file__)), "--rank", "--rounds", str(asked.rounds), "--out", str(asked.out)),
        *("--rates", *asked.rates),
    ]


def rank_main(asked: argparse.Namespace) -> int:
    """One of the four ranks."""
    import torch
    import torch.distributed as dist

    from shardbook.ranks.distributed import start_distributed

    ranks = start_distributed()
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        if hasattr(dist, name):
            setattr(dist, name, ring_reduce_scatter)
    variants = {name: build(keys, ranks) for name, keys in VARIANTS.items()}
    rows = []
    for rate in asked.rates:
        if ranks.local_rank == 0:
            limit(f"link{ranks.rank // 2}", RATES[rate])
        for round_ in range(asked.rounds or ROUNDS[rate]):
            for name, step in variants.items():
                dist.barrier()
                before, began = sent_bytes(), time.perf_counter()
                ledger_bytes = step()
                dist.barrier()
                seconds = time.perf_counter() - began
                # of one node: its two ranks' by the ledger, the interface's own
                both = torch.tensor([ledger_bytes * (ranks.rank < 2)])
                dist.all_reduce(both)
                wire = sent_bytes() - before
                if ranks.is_main:
                    row = {"rate": rate, "round": round_, "variant": name, "seconds": seconds}
                    rows.append(row | {"wire_bytes": wire, "ledger_bytes": int(both)})
                    print(f"{rate:>9} {name:>8} {seconds:7.2f} s {wire / 1e6:8.1f} MB", flush=True)
    if ranks.is_main:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"torch": torch.__version__, "tokens_of_a_rank": TOKENS, "shape": SHAPE, "dtype": "fp32"}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        asked.out.write_text(
            json.dumps({"commit": commit} | facts | {"medians": medians(rows), "rows": rows}, indent=1) + "\n"
        )
        print(asked.out)
    dist.barrier()
    os._exit(0)


def build(keys, ranks):
    """A function that takes one optimizer step of this variant and returns the bytes that the ledger says this rank
    sent to the other node."""
    import torch
    from transformers import AutoConfig

    from shardbook.comm.ledger import Ledger
    from shardbook.data.loader import Batching, build_micro_batch
    from shardbook.model.causal_lm import build_model, materialize
    from shardbook.model.weights import init_weights
    from shardbook.objectives.sft import sft_loss
    from shardbook.optim import build_optimizer
    from shardbook.optim.clip import clip_gradients
    from shardbook.parallel.layout import build_layout
    from shardbook.parallel.mesh import build_mesh
    from shardbook.parallel.sharding import apply_stage
    from shardbook.recipe import Optim, Parallel, Precision

    model = build_model(AutoConfig.for_model("llama", attn_implementation="sdpa", **SHAPE), "fp32")
    parts, world = (model, model.parts, model.blocks), (ranks.world_size, ranks.ranks_per_node)
    layout = build_layout(Parallel(**keys), Precision(params="fp32"), *parts, *world)
    sharded = apply_stage(model, layout, build_mesh(layout.sizes, "cpu"))
    materialize(model, ranks.device)
    init_weights(model, 0)
    optimizer = build_optimizer(model, Optim())
    dice = torch.Generator().manual_seed(ranks.rank)
    ids = torch.randint(0, SHAPE["vocab_size"], (TOKENS,), generator=dice).tolist()
    micro = build_micro_batch([{"input_ids": ids, "mask": [True] * TOKENS}], [(0,)], Batching(None, 1, 0, 1))

    def step() -> int:
        with Ledger(layout.groups(ranks.rank)) as ledger:
            ledger.open()
            with sharded.micro_batch(is_last=True):
                (sft_loss(model, micro) / (4 * TOKENS)).backward()
            clip_gradients(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return ledger.take_metrics(ranks.ranks_per_node, {})["comm/inter_node_bytes"]

    step()  # what is made once
    return step


def ring_reduce_scatter(output, input, op=None, group=None, async_op=False):
    """What NCCL sends. Gloo's own reduce-scatter is an all-reduce of which most is thrown away: seen here as twice the
    bytes on the link, which would flatter whatever is compared with zero3."""
    import torch
    import torch.distributed as dist

    size, rank = group.size(), group.rank()
    following, before = (dist.get_global_rank(group, (rank + way) % size) for way in (1, -1))
    chunks = list(input.view(size, -1).unbind())
    passed = chunks[(rank - 1) % size]
    for turn in range(size - 1):
        received = torch.empty_like(passed)
        sending = dist.isend(passed, following, group=group)
        dist.recv(received, before, group=group)
        sending.wait()
        passed = received + chunks[(rank - turn - 2) % size]
    output.copy_(passed)


def limit(device: str, rate: str | None) -> None:
    if rate is None:
        subprocess.run(["tc", "qdisc", "delete", "dev", device, "root"], check=False, stderr=subprocess.DEVNULL)
        return
    words = f"tc qdisc replace dev {device} root tbf rate {rate} burst 256k latency 100ms"
    subprocess.run(words.split(), check=True)


def sent_bytes() -> int:
    """Bytes that this node has sent over the link, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if name.startswith("link"):
            return int(counters.split()[8])
    raise RuntimeError("no link in this namespace")


def medians(rows) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for rate in dict.fromkeys(row["rate"] for row in rows):
        for name in VARIANTS:
            here = [row for row in rows if row["rate"] == rate and row["variant"] == name]
            keys = ("seconds", "wire_bytes", "ledger_bytes")
            found.setdefault(rate, {})[name] = {key: statistics.median(row[key] for row in here) for key in keys}
    return found


if __name__ == "__main__":
    sys.exit(main())
