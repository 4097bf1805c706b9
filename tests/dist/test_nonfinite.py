"""The first step whose gradient is not finite ends the run with its number, rank and rows; nothing that is not finite
is saved."""

import itertools
import re

import pytest
import torch
from cuda_stand_in import on_cuda
from planted import replace
from world import metrics, run_world

RUNS = {
    "device": (),
    "clipped": ("optim.max_grad_norm=0.5", "parallel.stage=zero1"),
    "host": ("offload.optimizer=cpu",),
    "host-clipped": ("offload.optimizer=cpu", "offload.params=cpu", "optim.max_grad_norm=0.5"),
}
WORDS = ("train.steps=5", "train.gradient_accumulation_steps=2", "train.export=false", "data.eval_size=0")
SAVES = ("train.save_steps=1", "train.async_save=false")
ROWS = {"loss": "rank 1: rows 11 to 11 of the run (documents ", "gradient": "rows 8 to 11 of the run: every loss is"}


def plant(kind):
    """In the third step, on rank 1: a NaN in the second micro-batch's `loss`, in a `gradient`, wherever that lies, or,
    once the norm is known, in a `weight` or a `moment`."""
    import torch.distributed as dist

    from shardbook.memory.host_adamw import HostAdamW
    from shardbook.optim.clip import clip_gradients
    from shardbook.parallel.step import MicroBatchRunner
    from shardbook.run.build import allocate_state

    accumulate, forward = HostAdamW._accumulate, MicroBatchRunner.forward
    step, optimizers = [1], []

    def is_due(what):
        return kind == what and step[0] == 3 and dist.get_rank() == 1

    def forward_planted(self, action, *rest):
        terms = forward(self, action, *rest)
        if is_due("loss") and action.micro == 1:
            hidden, terms = self.outputs[action.chunk, action.micro]
            terms = terms * torch.nan
            self.outputs[action.chunk, action.micro] = hidden, terms
        return terms

    def accumulate_planted(self, staging, d2h_event, unit, flat, *rest):
        if is_due("gradient") and unit.number == 1:
            flat[0] = torch.nan
        accumulate(self, staging, d2h_event, unit, flat, *rest)

    def clip_planted(gradients, limit):
        if not isinstance(gradients, HostAdamW):
            gradients = list(gradients)
            if is_due("gradient"):
                gradients[0].grad.to_local().view(-1)[0] = torch.nan
        norm = clip_gradients(gradients, limit)
        parameter = optimizers[0].param_groups[0]["params"][0]
        if is_due("weight"):
            parameter.detach().to_local().view(-1)[0] = torch.nan
        if is_due("moment"):
            optimizers[0].state[parameter]["exp_avg_sq"].to_local().view(-1)[0] = torch.nan
        step[0] += 1
        return norm

    def allocate_noted(*given):
        optimizers.append(allocate_state(*given))
        return optimizers[0]

    replace(clip_gradients, clip_planted)
    replace(allocate_state, allocate_noted)
    HostAdamW._accumulate, MicroBatchRunner.forward = accumulate_planted, forward_planted

    def take_back():
        replace(clip_planted, clip_gradients)
        replace(allocate_noted, allocate_state)
        HostAdamW._accumulate, MicroBatchRunner.forward = accumulate, forward

    return take_back


def train_planted(recipe, runs, kinds, bug=None):
    """On each rank, by run and kind: the error that ended the run."""
    from shardbook import train
    from shardbook.ranks.distributed import start_distributed
    from shardbook.ranks.exits import RunFailed
    from shardbook.recipe import load_recipe

    ranks, errors = start_distributed(), {}
    bug and bug()
    for (name, words), kind in itertools.product(runs.items(), kinds):
        take_back = plant(kind)
        try:
            train.train(load_recipe(recipe, [*WORDS, *words, f"run.name={name}-{kind}"]), recipe, ranks)
        except RunFailed as error:
            errors[name, kind] = str(error)
        finally:
            take_back()
    return errors


def saved(recipe, name):
    return sorted(path.name for path in (recipe.parent / name / "checkpoints").iterdir() if "step" in path.name)


@pytest.mark.parametrize(
    "names", [("device", "host-clipped"), pytest.param(("clipped", "host"), marks=pytest.mark.slow)]
)
def test_the_first_ends_a_run_by_its_step_rank_and_rows(recipe, names):
    runs = {name: (*RUNS[name], *SAVES) for name in names}
    for errors in run_world(2, train_planted, recipe, runs, ("loss", "gradient")):
        for name, kind in itertools.product(names, ("loss", "gradient")):
            value = "nan" if kind == "loss" else r"[0-9.]+"
            line = f"step 3: train/loss is {value} and train/grad_norm nan; lower optim.learning_rate, or look at "
            assert_begins(errors[name, kind], line, ROWS[kind])
            assert saved(recipe, f"{name}-{kind}") == ["step-000001", "step-000002"]
            assert [row["step"] for row in metrics(recipe.parent / f"{name}-{kind}") if "train/loss" in row] == [1, 2]


def assert_begins(error, pattern, rest):
    assert re.match(pattern + re.escape(rest), error), error


@pytest.mark.parametrize("logging", [0, 10])
def test_it_is_named_where_its_step_is_not_logged(recipe, logging):
    """A weight or a moment that became NaN in step 3 is seen by the numbers of step 4."""
    kinds = ("loss", "gradient", "weight", "moment")
    runs = {f"{name}-{logging}": (*RUNS[name], f"train.logging_steps={logging}") for name in ("device", "host")}
    for errors in run_world(2, train_planted, recipe, runs, kinds):
        for (_, kind), error in errors.items():
            rows, step = ROWS.get(kind, "rank 0: rows 12 to "), 3 if kind in ROWS else 4
            value = r"[0-9.]+" if kind == "gradient" else "nan"
            line = f"step {step}: train/loss is {value} and train/grad_norm nan; lower optim.learning_rate, or look at "
            assert_begins(error, line, rows)
        assert len(errors) == len(runs) * len(kinds)


@pytest.mark.parametrize("mode", ["false", "true"])
def test_no_checkpoint_is_published_of_what_is_not_finite(recipe, mode):
    """Its step has a loss and a norm that are finite: the checkpoint looks at each tensor."""
    runs = {
        f"{name}-{mode}": (*RUNS[name], "train.save_steps=1", f"train.async_save={mode}") for name in ("device", "host")
    }
    for errors in run_world(2, train_planted, recipe, runs, ("weight", "moment")):
        assert len(errors) == 4
        for (name, kind), error in errors.items():
            # beside steps it is written while the fourth one runs, whose norm may be read first
            assert " is not finite on rank 1, so it is not published" in error or (mode == "true" and "step 4" in error)
            assert saved(recipe, f"{name}-{kind}") == ["step-000001", "step-000002"], error


@pytest.mark.parametrize("mode", ["true", "wait"])
def test_the_checkpoint_that_is_being_written_is_published_first(recipe, mode):
    """That of step 2, which was finite. Step 3 ends the run before two sums of flags have told rank 0 to publish it."""
    runs = {f"{name}-behind-{mode}": (*RUNS[name], "train.save_steps=1", f"train.async_save={mode}") for name in RUNS}
    for errors in run_world(2, train_planted, recipe, runs, ("loss", "gradient")):
        assert len(errors) == 2 * len(runs)
        for (name, kind), error in errors.items():
            assert error.startswith("step 3: train/loss is "), error
            assert saved(recipe, f"{name}-{kind}") == ["step-000001", "step-000002"]


OPTIMIZERS = {"adamw": (), "adamw_bf16": (), "lion": ("optim.betas=[0.9,0.99]",), "muon": ()}


@pytest.mark.slow
def test_it_ends_a_run_where_only_the_device_knows_it(recipe):
    """The row is read while the next step computes, and before a save."""
    runs = {
        f"cuda-{name}": (*words, *SAVES, "precision.params=fp32", f"optim.name={name}")
        for name, words in OPTIMIZERS.items()
    }
    for errors in run_world(2, on_cuda, train_planted, recipe, runs, ("loss",)):
        for name in runs:
            assert errors[name, "loss"].startswith("step 3: train/loss is nan and train/grad_norm nan; lower")
            assert saved(recipe, f"{name}-loss") == ["step-000001", "step-000002"]


def only_logged_steps_are_read():
    """Planted: the numbers of a step that is not logged are dropped."""
    from shardbook.run.log.step_log import StepLog

    real = StepLog.end

    def end(log, *given):
        real(log, *given)
        log.pending.values.clear()

    StepLog.end = end


def numbers_of_the_step_before():
    """Planted: a step is told the numbers of the one before."""
    from shardbook.run.log.step_log import StepLog

    real, before = StepLog.end, []

    def end(log, *given):
        real(log, *given)
        before.append(log.pending.values)
        log.pending.values = before[-2:][0]

    StepLog.end = end


@pytest.mark.parametrize("bug", [only_logged_steps_are_read, numbers_of_the_step_before])
def test_a_planted_bug_turns_it_red(recipe, bug):
    words = ("train.logging_steps=0", *SAVES)
    (errors, _) = run_world(2, train_planted, recipe, {bug.__name__: words}, ("loss",), bug)
    assert not errors[bug.__name__, "loss"].startswith("step 3: ")
