"""What is in memory at once: gathered parameters to the byte of the formula, peaks in the order of the stages."""

import pytest
import torch
from live import Gathered, allocated
from torch import nn
from toys import Scenario, Toy, train_toy
from world import run_world

LAYERS, WIDTH, INNER = 6, 16, 96


class Wide(nn.Module):
    """A block whose weights are large beside its activations."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, hidden, gated):
        return hidden + self.down(torch.tanh(self.up(hidden)))


class WideToy(Toy):
    def __init__(self):
        super().__init__(vocab=257, width=WIDTH)
        self.layers = nn.ModuleList(Wide() for _ in range(LAYERS))


def watch_all(cases, bug=None):
    from shardbook.ranks.distributed import start_distributed

    start_distributed()
    if bug:
        bug()
    return {str(case): watch_gathers(*case) for case in cases}


@pytest.fixture(scope="module")
def watched(request):
    """Of each case that was asked for, on both ranks."""
    items = [item for item in request.session.items if "watched" in getattr(item, "fixturenames", ())]
    own = [item.callspec.params for item in items if item.module is request.module]
    return run_world(2, watch_all, [(params["stage"], params["parallel"]) for params in own])


def watch_gathers(stage, parallel):
    """(most blocks gathered at once, most bytes, the formula's bytes) in a step of three micro-batches."""
    from shardbook.plan.formulas import predict_gathered_peak

    seen = []

    def watch(layout):
        seen.append(layout)
        return Gathered(layout.units, ROOT)

    scenario = Scenario(build=WideToy, micros=3, parallel=parallel)
    _, gathered = train_toy(scenario, stage, 1, 2, 2, 0.0, watch)
    return gathered.most_units, gathered.most_bytes, predict_gathered_peak(seen[0])


BLOCK = (WIDTH * INNER + INNER + INNER * WIDTH + WIDTH) * 4
ROOT = (258 * WIDTH + 2 * WIDTH) * 4  # 257 rows padded to two equal shards


@pytest.mark.parametrize(
    "stage, parallel, blocks",
    [
        ("zero1", {}, LAYERS),
        ("zero2", {}, LAYERS),
        ("zero3", {}, 2),  # the running one, and one gathered ahead in backward
        ("zero3", {"backward_prefetch": 0}, 1),
        ("zero3", {"forward_prefetch": 2, "backward_prefetch": 0}, 3),
        ("zero3", {"forward_prefetch": 1, "backward_prefetch": 3}, 4),
        ("zero3", {"reshard_min_params": BLOCK // 4 + 1}, LAYERS),  # every block is smaller
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)
def test_gathered_at_once(stage, parallel, blocks, watched):
    for most_units, most_bytes, predicted in (found[str((stage, parallel))] for found in watched):
        assert most_bytes == ROOT + blocks * BLOCK
        assert most_units == blocks
        assert most_bytes == predicted


def everything_stays_gathered():
    """The sharded module's own flag is set and nothing is freed: numbers, traffic and persistent bytes are unharmed."""
    import toys
    from torch.distributed.fsdp import FSDPModule

    real = toys.nn.Module.__call__

    def call(module, *args, **kwargs):
        output = real(module, *args, **kwargs)
        if isinstance(module, FSDPModule):
            module.unshard()
        return output

    toys.nn.Module.__call__ = call


def test_a_planted_bug_turns_it_red():
    for found in run_world(2, watch_all, [("zero3", {})], everything_stays_gathered):
        ((most_units, most_bytes, predicted),) = found.values()
        assert most_units == LAYERS and most_bytes > predicted


STAGES = ("ddp", "zero1", "zero2", "zero3")


def step_peaks():
    from shardbook.ranks.distributed import start_distributed

    start_distributed()
    return {stage: step_peak(stage) for stage in STAGES}


def step_peak(stage):
    """Most bytes of a rank in a step of three micro-batches, with the parameters and AdamW's state that it keeps."""
    from shardbook.plan.formulas import predict_resident

    seen = []

    def watch(layout):
        seen.append(predict_resident(layout, rank=0))
        return Gathered(layout.units, ROOT)

    sizes = (2, 1) if stage == "ddp" else (1, 2)
    peak = train_toy(Scenario(build=WideToy, micros=3), stage, *sizes, 2, 0.0, watch)[1].most_total
    return peak + seen[0].optimizer_bytes + seen[0].params_bytes


def test_peaks_fall_from_stage_to_stage():
    both = run_world(2, step_peaks)
    peaks = {stage: max(found[stage] for found in both) for stage in STAGES}
    print(peaks)
    assert peaks["zero3"] < peaks["zero2"] < peaks["zero1"] < peaks["ddp"], peaks


def test_the_allocator_is_seen():
    assert allocated(lambda: torch.zeros(1000)) == (4000, 4000)
    assert allocated(lambda: (torch.zeros(1000), None)[1]) == (4000, 0)
