"""A rank that computes other bits the second time is found and named; a check changes no number of a run."""

import itertools

import pytest
import torch
from tiny import said_by
from world import losses, metrics, run_world

from shardbook.recipe import load_recipe

WORDS = ("train.steps=4", "train.gradient_accumulation_steps=2", "train.export=false", "data.eval_size=0")
CHECKED = ("train.check_steps=1", "train.deterministic=true")
RUNS = {
    "zero3": (),
    "ddp": ("parallel.stage=ddp",),
    "zero1": ("parallel.stage=zero1", "optim.max_grad_norm=0.5"),
    "qgZ": ("parallel.stage=zeropp", "parallel.quantize_gradients=[8,4]"),
    "dropout": ("lora.r=4", "lora.lora_dropout=0.5"),
}


def flip(tensor, count):
    """Flips the lowest bit of the first `count` numbers: less than any tolerance sees."""
    tensor.detach().view(-1)[:count].view(torch.int32).bitwise_xor_(1)


def plant(place):
    """On rank 1, from the fifth forward on: each other hidden state, or the gradient of each other one, has a wrong bit
    in each number; by `one-bit` in one number, which sums, and blocks of four bits, may round away on one CPU and not
    on another. Returns a function that takes it back."""
    import torch.distributed as dist

    from shardbook.model.causal_lm import CausalLM

    real, count = CausalLM.hidden_states, itertools.count()

    def hidden_states(*given, **named):
        out = real(*given, **named)
        if dist.get_rank() == 1 and (number := next(count)) > 4 and number % 2:
            if place == "backward":
                out.register_hook(lambda gradient: flip(gradient, gradient.numel()))
            else:
                flip(out, 1 if place == "one-bit" else out.numel())
        return out

    CausalLM.hidden_states = hidden_states if place in ("forward", "backward", "one-bit") else real
    return lambda: setattr(CausalLM, "hidden_states", real)


def train_checked(recipe, runs, places, bug=None):
    """On each rank, by run and place: what was said at its end."""
    from shardbook import train
    from shardbook.ranks.distributed import start_distributed
    from shardbook.ranks.exits import RunFailed

    ranks, said = start_distributed(), {}
    bug and bug()
    for (name, words), place in itertools.product(runs.items(), places):
        undo = plant(place)
        try:
            given = [*WORDS, *words, f"run.name={name}-{place}", *(CHECKED if place != "plain" else ())]
            train.train(load_recipe(recipe, given), recipe, ranks)
            said[name, place] = ""
        except RunFailed as error:
            said[name, place] = str(error)
        undo()
    return said


@pytest.mark.parametrize("names", [["zero3"], pytest.param(list(RUNS)[1:], marks=pytest.mark.slow)])
def test_the_rank_is_named_and_no_number_changes(recipe, names):
    runs = {name: RUNS[name] for name in names}
    for rank, found in enumerate(run_world(2, train_checked, recipe, runs, ("", "plain", "forward", "backward"))):
        for name in runs:
            for place in ("forward", "backward"):
                begins = "step 3: rank 1 computed one micro-batch twice and got other bits; look at its device"
                assert found[name, place].startswith(begins), (rank, name, place, found)
            assert found[name, ""] == found[name, "plain"] == ""
            checked, plain = (recipe.parent / f"{name}-{place}" for place in ("", "plain"))
            assert losses(checked) == losses(plain) and len(losses(plain)) == 4
            for key in ("train/grad_norm", "comm/reduce_scatter_calls"):
                assert [row.get(key) for row in metrics(checked)] == [row.get(key) for row in metrics(plain)]


def one_bit_is_not_seen():
    """Planted bug: what is compared is rounded."""
    from shardbook.run import sdc_check

    sdc_check.sum_bits = lambda tensor: tensor.double().abs().sum().mul(1e4).long()


@pytest.mark.slow
def test_what_is_rounded_turns_it_red(recipe):
    found, _ = run_world(2, train_checked, recipe, {"rounded": ()}, ("one-bit",), one_bit_is_not_seen)
    assert found == {("rounded", "one-bit"): ""}


def test_it_needs_kernels_that_repeat_themselves(recipe):
    said = said_by(load_recipe, recipe, ["train.check_steps=10"])
    assert said.endswith(
        "train.check_steps = 10: without deterministic kernels bits may differ anyway; set train.deterministic=true"
    )
