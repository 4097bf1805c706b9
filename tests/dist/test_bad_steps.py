"""A step whose gradient norm is not finite changes nothing, to the bit: weights, moments, step counts, host masters."""

import itertools

import pytest
import torch
from cuda_stand_in import on_cuda
from test_offload import digest
from world import metrics, run_world

RUNS = {
    "device": (),
    "clipped": ("optim.max_grad_norm=0.5", "parallel.stage=zero1"),
    "carried": ("parallel.stage=zeropp", "parallel.quantize_gradients=[8,4]", "parallel.quantize_error_feedback=true"),
    "host": ("offload.optimizer=cpu",),
    "host-clipped": ("offload.optimizer=cpu", "offload.params=cpu", "optim.max_grad_norm=0.5"),
}
WORDS = ("train.steps=5", "train.gradient_accumulation_steps=2", "train.export=false", "data.eval_size=0")


def plant(kind, step):
    """In the step of that number, on rank 1: a NaN in the second micro-batch's loss (`loss`), in a gradient, wherever
    that lies (`gradient`), or, once the norm is known, in a `weight` or a `moment`; or, on both ranks, no optimizer
    step (`passed`). Returns a function that takes it back."""
    import torch.distributed as dist

    from shardbook import train
    from shardbook.memory.host_adamw import HostAdamW
    from shardbook.parallel.pipeline import MicroBatchRunner
    from shardbook.parallel.sharding import ShardedModel

    places = ((train, "clip_gradients"), (HostAdamW, "_accumulate"), (MicroBatchRunner, "forward"))
    places += ((train, "step_if_finite"), (ShardedModel, "end_step"))
    clip, accumulate, forward, go, end = before = [getattr(*place) for place in places]
    begun = itertools.count(1)
    now = [next(begun)]

    def here(what):
        return kind == what and now[0] == step and dist.get_rank() == 1

    def forward_planted(self, action, *rest):
        made = forward(self, action, *rest)
        if here("loss") and action.micro == 1:
            hidden, made = self.outputs[action.chunk, action.micro]
            made = made * torch.nan
            self.outputs[action.chunk, action.micro] = hidden, made
        return made

    def clip_planted(gradients, limit):
        if not isinstance(gradients, HostAdamW):
            gradients = list(gradients)
            if here("gradient"):
                gradients[0].grad.to_local().view(-1)[0] = torch.nan
        return clip(gradients, limit)

    def accumulate_planted(self, staging, d2h_event, unit, flat, *rest):
        if here("gradient") and unit.number == 1:
            flat[0] = torch.nan
        accumulate(self, staging, d2h_event, unit, flat, *rest)

    def go_planted(optimizer, norm):
        parameter = optimizer.param_groups[0]["params"][0]
        if here("weight"):
            parameter.detach().to_local().view(-1)[0] = torch.nan
        if here("moment"):
            optimizer.state[parameter]["exp_avg_sq"].to_local().view(-1)[0] = torch.nan
        if not (kind == "passed" and now[0] == step):
            go(optimizer, norm)

    def end_planted(sharded, norm):
        end(sharded, norm * torch.nan if kind == "passed" and now[0] == step else norm)
        now[0] = next(begun)

    def put(functions):
        for place, function in zip(places, functions, strict=True):
            setattr(*place, function)

    put((clip_planted, accumulate_planted, forward_planted, go_planted, end_planted))
    return lambda: put(before)


def train_planted(recipe, runs, planted):
    """On each rank, by run and kind: a digest of weights and moments at the end of each `planted`, and what it said."""
    from shardbook import train
    from shardbook.ranks.distributed import start_distributed
    from shardbook.ranks.exits import RunFailed
    from shardbook.recipe import load_recipe
    from shardbook.run.console import Console

    ranks, settle, show, found = start_distributed(), train.materialize_state, Console.print, {}
    for name, kind in planted:
        seen, said, undo = {}, [], plant(kind, 3)

        def settled(model, sharded, optim, device, seen=seen):
            seen["optimizer"], seen["sharded"] = settle(model, sharded, optim, device), sharded
            return seen["optimizer"]

        train.materialize_state, Console.print = settled, lambda console, text, said=said: said.append(text)
        try:
            train.train(load_recipe(recipe, [*WORDS, *runs[name], f"run.name={name}-{kind}"]), recipe, ranks)
        except RunFailed as error:
            said.append(str(error))
        finally:
            train.materialize_state, Console.print = settle, show
            undo()
        residuals = [residual.double().sum().item() for residual in seen["sharded"].residuals.values()]
        assert all(residuals) and bool(residuals) == (name == "carried")
        found[name, kind] = digest(seen["sharded"], seen["optimizer"]) + residuals, said
    return found


def rows_of(recipe, name, keys=("train/loss", "train/grad_norm", "train/bad_steps")):
    return [{key: row[key] for key in keys if key in row} for row in metrics(recipe.parent / name)]


@pytest.mark.parametrize(
    "names", [("carried", "host-clipped"), pytest.param(("device", "clipped", "host"), marks=pytest.mark.slow)]
)
def test_a_run_goes_on_as_if_the_step_were_left_out(recipe, names):
    """Its rank and its rows are named, and all later losses, norms, weights and moments are those of a run that did not
    take the step."""
    runs = {name: (*RUNS[name], "train.max_bad_steps=1") for name in names}
    ranks = run_world(2, train_planted, recipe, runs, list(itertools.product(runs, ("passed", "loss", "gradient"))))
    for name, kind in itertools.product(runs, ("loss", "gradient")):
        for rank in ranks:
            assert rank[name, kind][0] == rank[name, "passed"][0] and len(rank[name, kind][0]) > 20, (name, kind)
            (line,) = [line for line in rank[name, kind][1] if "left out" in line]
            where = (
                "rank 1: rows 11 to 11 of the run (documents " if kind == "loss" else "rows 8 to 11 of the run: every"
            )
            assert line.startswith(f"left out step 3: the gradient norm is not finite; {where}"), line
        wanted, found = rows_of(recipe, f"{name}-passed"), rows_of(recipe, f"{name}-{kind}")
        assert [row.pop("train/bad_steps") for row in found] == [0, 0, 1, 1, 1]
        assert "train/grad_norm" not in found[2] and ("train/loss" in found[2]) == (kind == "gradient")
        assert [row.pop("train/bad_steps") for row in wanted] == [0] * 5
        assert found[:2] + found[3:] == wanted[:2] + wanted[3:], (name, kind)


@pytest.mark.parametrize(
    "names", [("host",), pytest.param(("device", "clipped", "host-clipped"), marks=pytest.mark.slow)]
)
def test_the_first_ends_a_run_and_has_changed_nothing(recipe, names):
    runs = {f"first-{name}": RUNS[name] for name in names}
    short = {f"{name}-short": (*words, "train.steps=2") for name, words in runs.items()}
    bad = list(itertools.product(runs, ("loss", "gradient")))
    for rank in run_world(2, train_planted, recipe, runs | short, [*bad, *((name, "passed") for name in short)]):
        for name, kind in bad:
            (after, said), (before, _) = rank[name, kind], rank[f"{name}-short", "passed"]
            assert before == after and len(before) > 20, (name, kind)
            assert said[-1].startswith("step 3: train/loss is ") and "train/grad_norm nan; lower" in said[-1], said
            assert f"look at {'rank 1: rows 11' if kind == 'loss' else 'rows 8 to 11'} " in said[-1], said


@pytest.mark.parametrize("quiet", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_broke_in_a_step_ends_a_run_on_all_ranks_at_once(recipe, quiet):
    """A weight or a moment that became NaN makes every later step a bad one: the second in a row is one too many. They
    are counted where nothing is logged."""
    words = ("train.max_bad_steps=1", *["train.logging_steps=0"] * quiet)
    runs = {f"broken-{name}-{quiet}": (*RUNS[name], *words) for name in ("device", "host")}
    for rank in run_world(2, train_planted, recipe, runs, list(itertools.product(runs, ("weight", "moment")))):
        for _, said in rank.values():
            assert said[-1].startswith("step 5: train/loss is nan and train/grad_norm nan; lower"), said
            assert ("step 4, the first whose norm was not finite: rank 0: rows 12" in said[-1]) == quiet


LAYOUTS = [("ddp", 2, 1), ("zero1", 1, 2), ("zero2", 1, 2), ("zero3", 1, 2), ("hsdp", 2, 1), ("zeropp", 1, 2)]
CARRIED = {"quantize_gradients": [8, 4], "quantize_error_feedback": True}
OPTIMIZERS = ("adamw", "adamw_bf16", "lion", "ademamix", "muon")


def train_toys(layouts, optimizers, kinds, step_if_finite=None, how=None):
    """On each rank, by stage, optimizer and kind: the losses of five steps, and weights, state and residuals after the
    third, which is a bad one, and after all."""
    import torch.distributed as dist
    from toys import DECAY, RATE, Scenario

    from shardbook import optim
    from shardbook.parallel.mesh import build_mesh
    from shardbook.parallel.sharding import apply_stage
    from shardbook.ranks.distributed import start_distributed
    from shardbook.recipe import Optim

    rank, found = start_distributed().rank, {}
    for (stage, *sizes), name, kind in itertools.product(layouts, optimizers, kinds):
        scenario = Scenario(parallel=CARRIED if stage == "zeropp" else {}, **(how or {}))
        betas = [0.9, 0.99, 0.999][: 2 + (name == "ademamix")]
        model, settings = scenario.model(), Optim(name=name, learning_rate=RATE, weight_decay=DECAY, betas=betas)
        layout = scenario.layout(model, stage, *sizes)
        sharded = apply_stage(model, layout, build_mesh(layout.sizes, "cpu"))
        optimizer, losses, digests = optim.build_optimizer(model, settings), [], []
        for step in range(5):
            is_bad, loss = step == 2, torch.zeros(())
            sharded.begin_step()
            for micro in range(2):
                with sharded.micro_batch(is_last=micro == 1):
                    part = scenario.loss(model, step, rank, micro) / scenario.tokens(step, 2)
                    (part * torch.nan if is_bad and kind == "loss" and rank == micro == 1 else part).backward()
                loss += part.detach()
            if is_bad and kind == "gradient" and (rank == 1 or stage in ("ddp", "hsdp")):  # replicas have the same sums
                local(next(model.parameters()).grad).view(-1)[0] = torch.inf
            norm = optim.clip_gradients(model.parameters(), 0.5)
            if not (is_bad and kind == "passed"):
                (step_if_finite or optim.step_if_finite)(optimizer, norm)
            sharded.end_step(norm * torch.nan if is_bad else norm)
            optimizer.zero_grad()
            dist.all_reduce(loss)
            losses.append(loss.item())
            optim.settle_counts(optimizer)
            if step in (1, 2, 4):
                digests.append(bits_of(model, optimizer, sharded.residuals))
        found[stage, name, kind] = losses, digests
    return found


def local(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def bits_of(model, optimizer, residuals):
    """Of this rank's weights, optimizer state and residuals, by name."""
    from shardbook.optim.elementwise import parts_of

    tensors = dict(model.named_parameters()) | residuals
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    parts = {name: parts_of(local(tensor)) for name, tensor in tensors.items()}
    return {name: [each.float().numpy().tobytes() for each in own] for name, own in parts.items()}


@pytest.mark.parametrize("layouts", [LAYOUTS[-1:], pytest.param(LAYOUTS[:-1], marks=pytest.mark.slow)])
def test_every_optimizer_under_every_stage_leaves_a_bad_step_out(layouts):
    """And what comes after it is, to the bit, what comes after a step that was not taken."""
    for rank in run_world(2, train_toys, layouts, OPTIMIZERS, ("passed", "loss", "gradient")):
        for (stage, *_), name, kind in itertools.product(layouts, OPTIMIZERS, ("loss", "gradient")):
            losses, (before, after, end) = rank[stage, name, kind]
            assert before == after != end and len(before) > 15, (stage, name, kind)
            assert (losses, [before, after, end]) == rank[stage, name, "passed"], (stage, name, kind)


def leave_set(optimizer, norm):
    """Planted: `found_inf` is set and never reset."""
    if not torch.isfinite(norm):
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
    optimizer.step()


def without_step_counts(optimizer, norm):
    """Planted: weights and moments stay, the counts go on."""
    from shardbook import optim

    optim.step_if_finite(optimizer, norm)
    if not torch.isfinite(norm):
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] += 1


@pytest.mark.parametrize("bug", [leave_set, without_step_counts])
def test_a_planted_bug_turns_it_red(bug):
    (found, *_) = run_world(2, train_toys, LAYOUTS[3:4], ("adamw",), ("passed", "loss"), bug)
    losses, digests = found["zero3", "adamw", "loss"]
    assert (losses, digests) != found["zero3", "adamw", "passed"]
    assert (digests[0] == digests[1]) == (bug is leave_set)


OWN = {"lion": "[0.9,0.99]", "adamw_bf16": "[0.9,0.99]", "ademamix": "[0.9,0.99,0.999]", "muon": "[0.9,0.99]"}


@pytest.mark.slow
def test_a_bad_step_is_left_out_where_only_the_device_knows_it(recipe):
    """What goes on is, to the bit, what a run does that takes no such step, its host's step counts too."""
    words = ("precision.params=fp32", "train.max_bad_steps=1")
    runs = {name: (*words, f"optim.name={name}", f"optim.betas={OWN[name]}") for name in OWN}
    for rank in run_world(2, on_cuda, train_planted, recipe, runs, list(itertools.product(runs, ("passed", "loss")))):
        for name in OWN:
            assert rank[name, "loss"][0] == rank[name, "passed"][0], name
            assert any("left out step 3" in line for line in rank[name, "loss"][1])
