"""Ranks that are killed again and again, each time at another moment: the run goes on every time, and its joined trace
and last checkpoint are, bit for bit, those of a run that nobody disturbed."""

import functools
import os
import random
import signal
import time

import pytest
from world import metrics, run_train, start_ranks

from shardbook.run.checkpoint.format import list_checkpoints, verify

STEPS = 64
SAVING = ("train.save_steps=1", "train.save_total_limit=2", "train.export=false", "data.eval_size=0")
WORDS = (f"train.steps={STEPS}", *SAVING)
MODES = {"async": "train.async_save=true", "sync": "train.async_save=false"}
SECONDS = 120  # by which a rank must have ended whose peer was killed
# of each phase: how many calls lie between the three moments at which it is met
PHASES = {"forward": 1, "backward": 1, "reduce": 3, "optimizer": 1, "stage": 17, "write": 3, "publish": 1, "prune": 2}
OF_RANK_0 = ("publish", "prune")  # it alone does this, whichever rank is killed meanwhile


@pytest.fixture(scope="module")
def straight(recipe):
    return run_train(2, recipe, "straight", *WORDS, MODES["sync"])


def plan_nothing():
    """Memory that is planned has no part in this, and takes half the time of a start."""
    from shardbook.plan.measure_blocks import Unmeasured
    from shardbook.run import prepare

    def check_host(*given):
        raise Unmeasured("not here")

    prepare.check_host = check_host


def killed_in(phase, number, victim, folder):
    """The `victim`th rank is killed when `phase` is met for the `number`th time."""
    plan_nothing()
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    if int(os.environ["RANK"]) != (0 if phase in OF_RANK_0 else victim):
        return
    met = []

    def meet():
        met.append(1)
        if len(met) == number:
            os.kill(int((folder / f"pid-{victim}").read_text()), signal.SIGKILL)

    def before(owner, name, counts=lambda *given: True):
        real = getattr(owner, name)

        @functools.wraps(real)
        def meets(*given, **named):
            if counts(*given):
                meet()
            return real(*given, **named)

        setattr(owner, name, meets)

    import torch
    import torch.distributed as dist

    from shardbook.model.causal_lm import CausalLM
    from shardbook.run.checkpoint import async_save, disk, save

    match phase:
        case "forward":
            before(CausalLM, "hidden_states")
        case "backward":
            real = CausalLM.hidden_states

            def hidden_states(*given, **named):
                out = real(*given, **named)
                if out.requires_grad:
                    out.register_hook(lambda gradient: meet())
                return out

            CausalLM.hidden_states = hidden_states
        case "reduce":
            before(dist, "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor")
        case "optimizer":
            before(torch.optim.AdamW, "step")
        case "stage":
            before(async_save, "_copy")
            before(save, "check_finite")
        case "write":
            before(disk, "write")
        case "publish":
            before(disk, "rename", lambda old, new: new.name.startswith("step-"))
        case "prune":
            before(disk, "remove")


def killed_at(dice, run, processes):
    """A rank is killed at a moment that dice choose: at the start, or in one of the next steps."""
    rows, began = count_rows(run), time.monotonic()
    steps, later, victim = dice.randrange(5), dice.random(), dice.randrange(2)
    while count_rows(run) < rows + steps and time.monotonic() < began + SECONDS:
        time.sleep(0.003)
    soon, began = rows + steps + 1, time.monotonic()  # by then: a machine at rest would else run to its end meanwhile
    while count_rows(run) < soon and time.monotonic() < began + later * (0.1 if steps else 3):
        time.sleep(0.003)
    processes[victim].kill()
    if not steps:  # it may not have joined yet: a launcher ends who waits for it
        processes[1 - victim].join(10)
        processes[1 - victim].kill()
    return victim


def count_rows(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def launch(recipe, words, folder, prepare=plan_nothing):
    folder.mkdir(exist_ok=True)
    return start_ranks(2, [str(recipe), *words], folder, prepare)


def end(processes, victim, folder):
    """Waits for both: one was killed, the other said so and ended."""
    for process in processes:
        process.join(SECONDS)
        assert process.exitcode is not None, "a rank waits for one that was killed"
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    said = (folder / f"{1 - victim}").read_text() if (folder / f"{1 - victim}").exists() else ""
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] in (0, 1, -signal.SIGKILL), (codes, said[-2000:])


def assert_undisturbed(recipe, name, words, folder, straight, prepare):
    """What is left to do is done; then nothing tells it from the straight run."""
    processes, run = launch(recipe, words, folder, prepare), recipe.parent / name
    for process in processes:
        process.join(SECONDS)
    assert [process.exitcode for process in processes] == [0, 0], (folder / "0").read_text()[-2000:]
    for key in ("step", "train/loss", "train/grad_norm", "train/tokens"):
        assert [row[key] for row in metrics(run)] == [row[key] for row in metrics(straight)], key
    found, wanted = (list_checkpoints(each / "checkpoints") for each in (run, straight))
    assert [each.name for each in found] == [each.name for each in wanted]
    for each in found:
        verify(each)
    for rank in range(2):
        mine, theirs = ((each[0] / f"rank-{rank}.bin").read_bytes() for each in (found, wanted))
        assert mine == theirs, f"rank {rank}"
    assert len(list((run / "checkpoints").iterdir())) == 2  # nothing half written is left


def chain(recipe, straight, tmp_path, name, mode, moments, last=plan_nothing):
    """Launches the run once for each of `moments`, (phase, number, victim) or dice."""
    words = [*WORDS, MODES[mode], f"run.name={name}"]
    for number, moment in enumerate(moments):
        folder = tmp_path / f"{number}"
        if isinstance(moment, random.Random):
            processes = launch(recipe, words, folder)
            victim = killed_at(moment, recipe.parent / name, processes)
        else:
            processes = launch(recipe, words, folder, functools.partial(killed_in, *moment, folder))
            victim = moment[2]
        end(processes, victim, folder)
    assert_undisturbed(recipe, name, words, tmp_path / "last", straight, last)


def phases(which, victim, among=PHASES):
    return [(phase, 1 + which * PHASES[phase], victim) for phase in among]


def test_killed_in_a_few_phases(recipe, straight, tmp_path):
    moments = [*phases(1, 0, ["optimizer", "stage"]), *phases(2, 1, ["write"]), *phases(1, 0, ["publish"])]
    chain(recipe, straight, tmp_path, "few", "async", moments)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_killed_in_every_phase(recipe, straight, tmp_path, which, victim, mode):
    """48 moments in each mode: eight phases, three times, either rank."""
    among = PHASES
    chain(recipe, straight, tmp_path, f"phases-{which}-{victim}-{mode}", mode, phases(which, victim, among))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_any_moment(recipe, straight, tmp_path, seed, mode):
    """Ten moments a seed and mode: 200."""
    dice = random.Random(f"{seed} {mode}")
    chain(recipe, straight, tmp_path, f"any-{seed}-{mode}", mode, [dice] * 10)


def moments_are_lost():
    """Planted bug: a resume begins the moments anew."""
    from shardbook.run.checkpoint.load import ItemReader

    plan_nothing()

    def read(reader, tensors):
        real(reader, {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")})

    real, ItemReader.read = ItemReader.read, read


@pytest.mark.slow
def test_moments_that_are_lost_turn_it_red(recipe, straight, tmp_path):
    with pytest.raises(AssertionError, match="train/loss"):
        chain(recipe, straight, tmp_path, "lost", "async", phases(2, 1, ["optimizer"]), moments_are_lost)
