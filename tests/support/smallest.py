"""The transformer of 260 parameters on two ranks: everything that a step sends and keeps, measured."""

from toys import Scenario, Smallest, train_toy

STAGES = ("ddp", "zero1", "zero2", "zero3")
PARTS = {"output": 32, "norm1": 8, "attention": 64, "norm2": 8, "ffn": 148}  # tied: the embedding is the output


def measure(stage: str, parallel: dict) -> dict[str, int]:
    """On one of two ranks: payload bytes of a step by operation, gathered peak, and bytes kept; each beside its
    formula's. bf16 on the wire and in the reduction, fp32 masters, one micro-batch."""
    import contextlib

    from live import Gathered

    from shardbook.comm.ledger import Ledger
    from shardbook.plan import events, formulas
    from shardbook.ranks.distributed import start_distributed
    from shardbook.run.log.memory import memory_metrics

    rank, found = start_distributed().rank, {}
    sizes = (2, 1) if stage == "ddp" else (1, 2)
    scenario = Scenario(
        build=Smallest, vocab=8, micros=1, parallel=parallel, precision={"params": "bf16", "reduce": "bf16"}
    )

    @contextlib.contextmanager
    def watch(layout):
        found["layout"], found["ledger"] = layout, Ledger(layout.groups(rank))
        with found["ledger"], Gathered(layout.units) as gathered:
            found["ledger"].open()
            yield gathered

    def note_memory(sharded, optimizer):
        found["memory"] = memory_metrics(sharded, optimizer)

    _, gathered = train_toy(scenario, stage, *sizes, 2, 0.0, watch, note_memory)
    layout, ledger = found["layout"], found["ledger"]
    predicted, resident = formulas.predict_traffic(layout, micros=1), formulas.predict_resident(layout, rank)
    measured = {key: volume.payload_bytes for key, volume in ledger.traffic.items()}
    named = {"all_gather": ("all_gather", "dp_shard"), "reduce_scatter": ("reduce_scatter", "dp_shard")}
    result = {op: measured.get(key, 0) for op, key in named.items()}
    result["all_reduce"] = measured.get(("all_reduce", "dp_replicate"), 0)
    wanted = {op: predicted[key].payload_bytes if key in predicted else 0 for op, key in named.items()}
    # the watched part of a step has no token counts in it; the formula has, and here on this axis
    sums = events.COUNTS_BYTES + events.FLAGS_BYTES
    wanted["all_reduce"] = predicted["all_reduce", "dp_replicate"].payload_bytes - sums if stage == "ddp" else 0
    assert result == wanted, (result, wanted)
    result["gathered_peak"] = gathered.most_bytes
    assert result["gathered_peak"] == formulas.predict_gathered_peak(layout)
    for kind in ("params", "grads", "optimizer"):
        result[kind] = found["memory"][f"memory/{kind}_bytes"]
        assert result[kind] == getattr(resident, f"{kind}_bytes"), kind
    result["paper"] = formulas.paper_resident(layout.stage, sum(PARTS.values()), 2).total_bytes
    return result


def traffic(measured: dict[str, int]) -> int:
    """Bytes of a step in the papers' count: an all-reduce is a reduce-scatter and an all-gather, so it counts twice."""
    return measured["all_gather"] + measured["reduce_scatter"] + 2 * measured["all_reduce"]


def table(measured: dict[str, dict[str, int]]) -> str:
    """The page's table, from what was measured."""
    lines = [
        "| stage | all-gather | reduce-scatter | all-reduce | traffic of a step | gathered at most | parameters kept | "
        "gradients | optimizer | paper's memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for stage, of in measured.items():
        numbers = [of["all_gather"], of["reduce_scatter"], of["all_reduce"], traffic(of), of["gathered_peak"]]
        numbers += [of["params"], of["grads"], of["optimizer"], int(of["paper"])]
        lines.append(f"| `{stage}` | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join(lines)
