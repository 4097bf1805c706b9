"""State off the device beside tensor and pipeline parallel: every tier gives the bits of none."""

import dataclasses

import pytest
import torch
from cases import TOLERANCE, Case, assert_case, assert_events, outcomes_of, run_cases, same_bits
from pairs import go_on_from
from pipeline_cases import LONG, deep
from safetensors.torch import load_file
from tensor_cases import of_model
from world import losses, metrics, run_train, run_world

CPU, BOTH = ("offload.optimizer=cpu",), ("offload.optimizer=cpu", "offload.params=cpu")
DISK, ALL_ON_DISK = ("offload.optimizer=nvme",), ("offload.optimizer=nvme", "offload.params=nvme")
LOOPED = {"pp": 2, "schedule": "interleaved"}
UNPACKED = ("data.packing=false",)
QUICK = [  # each with the tiers that it is run in
    (Case("zero3", 1, 1, 3, True, tp=2), [CPU, ALL_ON_DISK]),
    (Case("zero1", 1, 1, 2, tied=False, checkpointing="full", tp=2), [CPU]),
    (Case("zero3", 1, 1, 3, True, pp=2), [BOTH, DISK]),
    (Case("zero1", 1, 1, 2, True, tied=False, pp=2, schedule="gpipe"), [CPU]),
]
MORE = [
    (of_model("qwen3", "zero3", 1, 1, 2, micros=2, clips=True, extra=UNPACKED), [ALL_ON_DISK]),
    (Case("zero2", 1, 1, 3, True, pp=2), [CPU]),
    (deep("zero3", 1, 1, 4, clips=True, checkpointing="full", chunks=2, **LOOPED), [BOTH]),
    (Case("zero3", 1, 2, 3, True, checkpointing="full", tp=2), [BOTH]),
    (Case("zero2", 1, 2, 2, True, checkpointing="selective", tp=2), [CPU]),
    (Case("hsdp", 2, 1, 3, True, False, tp=2, steps=5), [CPU]),
    (of_model("nine", "zero3", 1, 2, 2, micros=2, clips=True), [BOTH]),
    (Case("zero3", 1, 1, 2, checkpointing="selective", tp=4), [ALL_ON_DISK]),
    (Case("zero3", 1, 2, 3, True, checkpointing="full", pp=2), [BOTH]),
    (Case("hsdp", 2, 1, 3, True, pp=2, schedule="gpipe"), [ALL_ON_DISK]),
    (deep("zero3", 1, 1, 6, clips=True, extra=UNPACKED, pp=4), [BOTH]),
    (deep("zero1", 1, 2, 2, tied=False, chunks=3, **LOOPED), [DISK]),
    (deep("zero3", 1, 1, 2, clips=True, chunks=2, tp=2, **LOOPED), [ALL_ON_DISK]),
    (Case("zero3", 1, 1, 3, True, checkpointing="every:2", pp=2, tp=2), [BOTH]),
    (Case("zero1", 1, 1, 3, True, False, "selective", extra=LONG, pp=2, cp=2), [CPU]),
]
GROUPS = {  # of one world each
    "quick": QUICK,
    "two": [one for one in MORE if one[0].world == 2],
    "four": [one for one in MORE if one[0].world == 4],
}


def rows_of(case, results):
    keys = "train/loss", "train/grad_norm", "eval/loss"
    return [{key: row[key] for key in keys if key in row} for row in metrics(results / case.name)]


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=[pytest.mark.slow] * (group != "quick")) for group in GROUPS]
)
def test_every_tier_gives_the_bits_of_none(group, recipe, models, tmp_path, wanted_of):
    """Losses, norms, gradients and weights. Traffic, events, what is kept and what offload moves are as predicted."""
    disk, results = tmp_path / "disk", tmp_path / "results"
    disk.mkdir()
    results.mkdir()
    pairs = []
    for none, tiers in GROUPS[group]:
        for tier in tiers:
            path = (f"offload.path={disk}",) * ("offload.optimizer=nvme" in tier)
            pairs.append((none, dataclasses.replace(none, extra=(*none.extra, *tier, *path))))
    cases = list(dict.fromkeys(case for pair in pairs for case in pair))
    world = cases[0].world
    assert run_world(world, run_cases, recipe, models, cases, results) == [[]] * world
    for none, away in pairs:
        found, outcomes = outcomes_of(none, results), outcomes_of(away, results)
        worst = assert_case(away, outcomes, wanted_of(away))
        assert_events(outcomes)
        assert same_bits(outcomes[0].result, found[0].result), away.name
        assert rows_of(away, results) == rows_of(none, results), away.name
        moved = [outcome.memory[0]["offload/to_host_bytes"] for outcome in outcomes]
        assert min(moved) > 0 and "memory/host_bytes" in outcomes[-1].memory[0]
        row = next(row for row in metrics(results / away.name) if "train/loss" in row)
        assert row["offload/to_host_bytes"] == row["predicted/offload/to_host_bytes"] == moved[0]
        print(f"\nworst {worst:.1e}  {away.name}")
    assert not list(disk.iterdir())


SAVING = ("train.steps=6", "train.save_steps=2", "optim.max_grad_norm=0.5", "train.gradient_accumulation_steps=2")
AXES = {"tp": ("parallel.tp_size=2",), "pp": ("parallel.pp_size=2",)}


@pytest.mark.parametrize("axis", ["tp", pytest.param("pp", marks=pytest.mark.slow)])
def test_a_checkpoint_knows_no_tier_beside_an_axis(axis, recipe, tmp_path):
    """From the device to the host, from there to the device, and to a disk beside the other axis: the straight run's
    losses and weights."""
    words, (other,) = (*SAVING, *AXES[axis]), (AXES[name] for name in AXES if name != axis)
    straight = run_train(2, recipe, f"straight-{axis}", *words)
    run = go_on_from(straight, f"to-host-{axis}", 2)
    run_train(2, recipe, run.name, *words, *BOTH, "train.steps=4")
    assert losses(run) == losses(straight)[:4]
    back = go_on_from(run, f"from-host-{axis}", 4)
    run_train(2, recipe, back.name, *words)
    away = go_on_from(run, f"to-disk-{axis}", 4)
    run_train(2, recipe, away.name, *SAVING, *other, *ALL_ON_DISK, f"offload.path={tmp_path}")
    assert losses(back) == losses(straight) and losses(away) == pytest.approx(losses(straight), rel=TOLERANCE)
    bitwise, near, want = (load_file(one / "export" / "model.safetensors") for one in (back, away, straight))
    assert near.keys() == bitwise.keys() == want.keys()
    assert all(torch.equal(bitwise[name], want[name]) for name in want)
    for name in want:
        torch.testing.assert_close(near[name], want[name], rtol=1e-5, atol=1e-6)
