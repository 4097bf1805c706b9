"""A step whose gradient norm is not finite changes nothing, to the bit: weights, moments, step counts, host masters."""

import itertools

import pytest
import torch
from test_offload import digest
from world import run_world

TIERS = {
    "device": (),
    "host": ("offload.optimizer=cpu",),
    "host, clipped": ("offload.optimizer=cpu", "offload.params=cpu", "optim.max_grad_norm=0.5"),
}


def plant_nan(step):
    """A NaN on rank 1 in the gradients of the step of that number, wherever they lie."""
    import torch.distributed as dist

    from shardbook import train
    from shardbook.memory.host_adamw import HostAdamW

    clip, take_in, begun = train.clip_gradients, HostAdamW._take_in, itertools.count(1)
    now = [next(begun)]

    def clip_gradients(gradients, limit):
        if not isinstance(gradients, HostAdamW):
            gradients = list(gradients)
            if now[0] == step and dist.get_rank() == 1:
                gradients[0].grad.to_local().view(-1)[0] = torch.nan
        norm = clip(gradients, limit)
        now[0] = next(begun)
        return norm

    def take_in_planted(self, unit, flat, *rest):
        if now[0] == step and dist.get_rank() == 1 and unit.number == 1:
            flat[0] = torch.nan
        take_in(self, unit, flat, *rest)

    train.clip_gradients, HostAdamW._take_in = clip_gradients, take_in_planted

    def undo():
        train.clip_gradients, HostAdamW._take_in = clip, take_in

    return undo


def train_to_a_bad_step(recipe, runs):
    """On each rank, by name: the digest of weights and moments after two steps, after a third one with a NaN, and what
    was said then."""
    from shardbook import train
    from shardbook.ranks.distributed import start_distributed
    from shardbook.ranks.exits import RunFailed
    from shardbook.recipe import load_recipe

    ranks, settle, found = start_distributed(), train.settle, {}
    for name, words in runs.items():
        digests, said = [], ""
        for steps in (2, 3):
            seen = {}

            def settled(model, sharded, optim, device, seen=seen):
                seen["optimizer"], seen["sharded"] = settle(model, sharded, optim, device), sharded
                return seen["optimizer"]

            train.settle, undo = settled, plant_nan(3)
            words = [*words, f"train.steps={steps}", f"run.name=bad-{len(found)}-{steps}", "train.export=false"]
            try:
                train.train(load_recipe(recipe, words), recipe, ranks)
            except RunFailed as error:
                said = str(error)
            finally:
                train.settle = settle
                undo()
            digests.append(digest(seen["sharded"], seen["optimizer"]))
        found[name] = (*digests, said)
    return found


def test_nothing_changes_in_a_bad_step(recipe):
    for rank in run_world(2, train_to_a_bad_step, recipe, TIERS):
        for tier, (before, after, said) in rank.items():
            assert before == after and len(before) > 20, tier
            assert "step 3: train/loss is 5." in said and "train/grad_norm nan" in said, (tier, said)
    assert rank["host"][0] == rank["device"][0]
