"""Off the device: every tier gives the bits of none, in every stage; what lies where is predicted to the byte."""

import dataclasses
import hashlib
import itertools
import os

import pytest
import torch
from pairs import go_on_from
from planted import replace
from recorded import Record
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from world import STREAMS, losses, metrics, run_train, run_world, start_ranks, train_rank

STAGES = {
    "zero1": ("parallel.stage=zero1",),
    "zero2": ("parallel.stage=zero2",),
    "zero3": ("parallel.stage=zero3",),
    "hsdp": ("parallel.stage=hsdp", "parallel.dp_shard_size=1"),
    "qwZ": ("parallel.stage=zeropp", "parallel.quantize_weights=8"),
    "qgZ": ("parallel.stage=zeropp", "parallel.quantize_gradients=[8,4]"),
}
RUNS = {
    "one": ("train.gradient_accumulation_steps=1", "optim.max_grad_norm=0.5"),
    "three": ("train.gradient_accumulation_steps=3", "optim.max_grad_norm=0.5"),
    "free": ("train.gradient_accumulation_steps=3", "optim.max_grad_norm=0"),
    "bf16": ("train.gradient_accumulation_steps=3", "optim.max_grad_norm=0.5", "precision.params=bf16"),
}


def tiers(stage, disk):
    """Every pair of optimizer and params that the stage may have."""
    resharding = stage not in ("zero1", "zero2")
    for optimizer, params in itertools.product(("cpu", "nvme"), ("none", "cpu", "nvme")):
        if (params != "none" and not resharding) or (optimizer, params) == ("cpu", "nvme"):
            continue
        words = (f"offload.optimizer={optimizer}", f"offload.params={params}")
        yield f"{optimizer}-{params}", (*words, *[f"offload.path={disk}"] * ("nvme" in (optimizer, params)))


def train_all(recipe, runs):
    """On each rank: train each of `runs` (a name and words), and say what came of it."""
    from shardbook import train
    from shardbook.memory import host_adamw
    from shardbook.ranks.distributed import start_distributed
    from shardbook.recipe import load_recipe
    from shardbook.run.build import allocate_state
    from shardbook.run.log.memory import memory_metrics

    host_adamw.BUCKET_BYTES = 2**20  # a unit has several
    ranks, said = start_distributed(), {}
    for name, words in runs.items():
        seen = {}

        def allocate_seen(model, sharded, *given, seen=seen):
            seen["optimizer"], seen["sharded"] = allocate_state(model, sharded, *given), sharded
            return seen["optimizer"]

        def measure_seen(*kept, seen=seen):
            seen["memory"] = memory_metrics(*kept)
            return seen["memory"]

        replace(allocate_state, allocate_seen)
        replace(memory_metrics, measure_seen)
        settings = load_recipe(recipe, [*words, f"run.name={name}", "train.export=false"])
        try:
            with Record().follow(ranks.rank) as record:
                assert train.train(settings, recipe, ranks) == 0
        finally:
            replace(allocate_seen, allocate_state)
            replace(measure_seen, memory_metrics)
        digests = digest(seen["sharded"], seen["optimizer"])
        said[name] = digests, seen["memory"], predicted(seen["sharded"], ranks.rank), record.differences()
    return said


def digest(sharded, optimizer):
    """Of this rank's masters and moments, by name."""
    masters, words = sharded.masters, []
    for name, parameter in masters.named_parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
            words.append((name, hashlib.sha256(local.flatten().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()))
    return words


def predicted(sharded, rank):
    from dataclasses import asdict

    from shardbook.memory.host_state import offloaded_bytes
    from shardbook.plan.formulas import predict_resident

    found = {f"memory/{what}": value for what, value in asdict(predict_resident(sharded.layout, rank)).items()}
    if sharded.layout.offload.optimizer != "none":
        found |= {f"memory/{where}_bytes": size for where, size in offloaded_bytes(sharded.layout, rank).items()}
    return found


def rows(recipe, name):
    keys = ["step", "train/loss", "train/grad_norm", "eval/loss", "train/learning_rate"]
    if STREAMS in os.environ:
        keys.remove("train/grad_norm")  # a GPU sums each whole tensor in fp64, the host row by row
    return [{key: row[key] for key in keys if key in row} for row in metrics(recipe.parent / name)]


def first(recipe, name):
    return next(row for row in metrics(recipe.parent / name) if "train/loss" in row)


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


MOVED = ("to_host", "to_device", "disk_read", "disk_written")
COMMON = ("train.steps=4", "train.eval_steps=2", "optim.weight_decay=0.1")


IN_MAKE_TEST = [("zero3", "three")]
IN_SLOW = [
    ("qgZ", "bf16"),
    ("zero1", "three"),
    ("zero2", "three"),
    ("hsdp", "free"),
    ("qwZ", "one"),
    ("zero3", "free"),
    ("zero3", "bf16"),
    ("zero1", "bf16"),
]


def pytest_generate_tests(metafunc):
    """With --everything each stage under each of RUNS; else a covering part."""
    if {"stage", "run"} <= set(metafunc.fixturenames):
        streams = metafunc.config.getoption("streams")  # there an exchange of bytes has streams of its own
        slow = [
            pytest.param(*case, marks=[pytest.mark.slow] * (case != ("qgZ", "bf16") or not streams)) for case in IN_SLOW
        ]
        everything = list(itertools.product(STAGES, RUNS))
        whole = metafunc.config.getoption("everything")
        metafunc.parametrize(("stage", "run"), everything if whole else IN_MAKE_TEST + slow)


def test_every_tier_gives_the_bits_of_none(recipe, disk, stage, run):
    words = (*COMMON, *STAGES[stage], *RUNS[run])
    none = f"{stage}-{run}-none"
    runs = {none: [word for word in words if not word.startswith("offload")]}
    runs |= {f"{stage}-{run}-{name}": [*words, *more] for name, more in tiers(stage, disk)}
    results = run_world(2, train_all, recipe, runs)
    for name in runs:
        for of_none, of_tier in zip(*([result[other] for result in results] for other in (none, name)), strict=True):
            assert of_tier[0] == of_none[0], f"{name}: masters or moments differ"
            assert {key: of_tier[1][key] for key in of_tier[2]} == of_tier[2], f"{name}: bytes"
            assert not of_tier[3][""] and "happened" in of_tier[3]["an event forgotten"], f"{name}: {of_tier[3]['']}"
        assert rows(recipe, name) == rows(recipe, none), name
        if name != none:
            moved = {key: value for key, value in first(recipe, name).items() if key.startswith("offload/")}
            said = {f"offload/{what}_bytes": first(recipe, name)[f"predicted/offload/{what}_bytes"] for what in MOVED}
            assert {**dict.fromkeys(said, 0), **moved} == said, name
    assert not list(disk.iterdir())


def train_partly(recipe, runs):
    """The same with a matrix of the first block frozen, and one in the second that is trained and never used."""
    from shardbook.parallel import placement

    real = placement.build_local

    def build_local(*words):
        local = real(*words)
        first, second = local.model.blocks[:2]
        first.mlp.down_proj.weight.requires_grad_(False)
        weight = first.mlp.down_proj.weight
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # before torch 2.13 such a run is refused
            second.register_parameter(
                "unused", torch.nn.Parameter(torch.empty(5, 7, dtype=weight.dtype, device="meta"))
            )
        return dataclasses.replace(local, placements=placement.place_whole(local.model))

    placement.build_local = build_local
    return train_all(recipe, runs)


def test_what_is_frozen_stays_and_what_is_unused_decays(recipe, disk):
    words = (*COMMON, *STAGES["zero3"], *RUNS["bf16"], "model.init=random")
    runs = {"partly-none": [word for word in words if not word.startswith("offload")]}
    runs |= {f"partly-{name}": [*words, *more] for name, more in tiers("zero3", disk)}
    for result in run_world(2, train_partly, recipe, runs):
        for name in runs:
            if name != "partly-none":
                mine, theirs = dict(result[name][0]), dict(result["partly-none"][0])
                assert mine == theirs and len(mine) == len(theirs) > 20, name
                assert {key: result[name][1][key] for key in result[name][2]} == result[name][2], name


def test_a_disk_that_fails_in_mid_run_is_named(recipe, disk):
    """Exit code 1, the folder and the error in one line, and the checkpoint before it is whole."""
    words = ("train.steps=6", "train.save_steps=2", "offload.optimizer=nvme", f"offload.path={disk}")
    [(code, _, error)] = run_world(1, train_on_a_failing_disk, [str(recipe), "run.name=failing", *words])
    assert code == 1 and f"{disk}: EIO at" in error.strip().splitlines()[-1], error
    assert (recipe.parent / "failing" / "checkpoints" / "step-000002" / "manifest.json").exists()
    run_train(1, recipe, "failing", *words)
    assert len(losses(recipe.parent / "failing")) == 6


def train_on_a_failing_disk(words):
    import errno
    import os

    real, calls = os.pwritev, []

    def pwritev(*what):
        calls.append(what)
        if len(calls) > 3 * 4 * 3:  # four units of three parts each: in the fourth step
            raise OSError(errno.EIO, "planted")
        return real(*what)

    os.pwritev = pwritev
    return train_rank(words)


SAVING = ("train.steps=6", "train.save_steps=2", "optim.warmup_steps=2", "optim.lr_scheduler_type=constant")
ON_HOST = ("offload.optimizer=cpu", "offload.params=cpu")


@pytest.fixture(scope="module")
def straight(recipe):
    """Six steps without a stop on 2 ranks under zero3, state on the device."""
    return run_train(2, recipe, "offload-straight", *SAVING)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_checkpoint_knows_no_tier(recipe, straight, disk, tier):
    """From the device to a tier, from there to the device and another world: the straight run's losses and weights."""
    words = (f"offload.optimizer={tier}", f"offload.params={tier}", *[f"offload.path={disk}"] * (tier == "nvme"))
    run = go_on_from(straight, f"to-{tier}", 2)
    run_train(2, recipe, run.name, *SAVING, *words, "train.steps=4")
    assert losses(run) == losses(straight)[:4]
    back = go_on_from(run, f"from-{tier}", 4)
    run_train(2, recipe, back.name, *SAVING)
    assert losses(back) == losses(straight)
    mine, theirs = (load_file(one / "export" / "model.safetensors") for one in (back, straight))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    other = go_on_from(run, f"alone-{tier}", 4)
    run_train(1, recipe, other.name, *SAVING, *words, "train.gradient_accumulation_steps=2")
    assert losses(other) == pytest.approx(losses(straight), rel=1e-6)


def test_killed_in_mid_step_it_goes_on(recipe, straight, disk):
    """SIGKILL while AdamW writes to the disk: nothing is left there, and the same command gives the straight run."""
    words = ("offload.optimizer=nvme", "offload.params=nvme", f"offload.path={disk}")
    run = go_on_from(straight, "killed", 2)
    processes = start_ranks(2, [str(recipe), f"run.name={run.name}", *SAVING, *words], disk.parent, die_in_a_write)
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes].count(-9) >= 1
    assert not list(disk.iterdir()) and len(losses(run)) < 6
    run_train(2, recipe, run.name, *SAVING, *words)
    assert losses(run) == losses(straight)


def die_in_a_write():
    """Rank 1 is killed in the tenth write that its steps begin."""
    import os
    import signal

    from shardbook.memory.direct_io import DirectFile

    real, calls = DirectFile.write, []

    def write(self, source, offset):
        calls.append(offset)
        if len(calls) == 40 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, source, offset)

    DirectFile.write = write


def test_the_gather_of_the_first_unit_waits_for_no_other(recipe):
    """An event log: with clipping no step before the norm; the next forward begins while later units are stepped."""
    words = ["train.steps=4", "optim.max_grad_norm=0.5", "train.export=false", *ON_HOST]
    events = run_world(1, logged, recipe, words)[0]
    norms = [at for at, event in enumerate(events) if event == "norm"]
    assert len(norms) == 4
    for before, after in zip(norms, [*norms[1:], len(events)], strict=True):
        own = events[before:after]
        units = {event.split()[1] for event in own if event.startswith("stepped")}
        assert len(units) == 4 and not any(event.startswith("stepped") for event in events[: norms[0]])
        if after < len(events):
            assert own.index("gathered 0") < max(own.index(f"stepped {unit}") for unit in units), own


def logged(recipe, words):
    import time

    from shardbook import train
    from shardbook.memory import host_adamw
    from shardbook.ranks.distributed import start_distributed
    from shardbook.recipe import load_recipe

    events, adamw = [], host_adamw.HostAdamW
    step, gather, clip = adamw._step, adamw.gather, adamw.clip

    def stepped(self, unit, *rest):
        step(self, unit, *rest)
        events.append(f"stepped {unit.number}")
        time.sleep(0.6)

    def gathered(self, unit, number):
        found = gather(self, unit, number)
        if number == 0:
            events.append(f"gathered {unit.number}")
        return found

    def normed(self, limit):
        found = clip(self, limit)
        events.append("norm")
        return found

    adamw._step, adamw.gather, adamw.clip = stepped, gathered, normed
    ranks = start_distributed()
    assert train.train(load_recipe(recipe, [*words, "run.name=logged"]), recipe, ranks) == 0
    return events


@pytest.mark.parametrize("kind", ["full", "every:2", pytest.param("selective", marks=pytest.mark.slow)])
def test_inputs_of_blocks_come_back_as_they_were(recipe, kind):
    words = ("train.steps=3", "train.gradient_accumulation_steps=2", f"activation.checkpointing={kind}")
    name = kind.replace(":", "-")
    here = run_train(2, recipe, f"inputs-{name}", *words)
    away = run_train(2, recipe, f"inputs-{name}-away", *words, "offload.activations=cpu", *ON_HOST)
    assert losses(away) == losses(here)
    mine, theirs = (load_file(one / "export" / "model.safetensors") for one in (away, here))
    assert all(torch.equal(mine[tensor], theirs[tensor]) for tensor in theirs)


REFUSED = {
    "ddp": (["parallel.stage=ddp", "offload.optimizer=cpu"], "offload.optimizer = 'cpu' and parallel.stage = 'ddp'"),
    "zero2": (["parallel.stage=zero2", *ON_HOST], "offload.params = 'cpu' and parallel.stage = 'zero2'"),
    "further": (["offload.params=cpu"], "params = 'cpu': lies further out than optimizer = 'none'"),
    "no path": (["offload.optimizer=nvme"], "path = '': needs a directory on a disk"),
    "path alone": (["offload.path=/tmp"], "no tier is nvme"),
    "missing": (["offload.optimizer=nvme", "offload.path=/no/such"], "offload.path = '/no/such': does not exist"),
    "a file": (["offload.optimizer=nvme", "offload.path=/etc/passwd"], "is a file"),
    "memory": (["offload.optimizer=nvme", "offload.path=/dev/shm"], "tmpfs, which is memory"),
    "other": (["offload.optimizer=cpu", "optim.name=adamw_bf16"], "optim.name = 'adamw_bf16': the host runs AdamW"),
    "nothing recomputed": (["offload.activations=cpu"], "only recomputed blocks offload inputs"),
    "secondary": (
        ["parallel.stage=zeropp", "parallel.secondary_shard=1", "offload.optimizer=cpu"],
        "parallel.secondary_shard",
    ),
}


@pytest.mark.parametrize("case", [*REFUSED])
def test_what_cannot_be_is_refused_in_one_line(recipe, case):
    words, said = REFUSED[case]
    for code, _, error in run_world(2, train_rank, [str(recipe), f"run.name=refused-{case.replace(' ', '-')}", *words]):
        assert code == 2 and said in error and len(error.strip().splitlines()) == 1, error


def shards_of_the_step_before():
    from shardbook.memory.host_adamw import HostAdamW

    def step(self):
        for unit in self.units:
            unit.ready = self.worker.submit(self._step, unit, self._settings(), self.coefficient, unit.accumulated)

    HostAdamW.step = step


def rate_of_the_step_before():
    from shardbook.memory.host_adamw import HostAdamW

    real, seen = HostAdamW._settings, {}

    def settings(self):
        now = real(self)
        before = seen.setdefault(id(self), [now])
        if now[0][0]["lr"] != before[-1][0][0]["lr"]:
            before.append(now)
        return before[-2] if len(before) > 1 else now

    HostAdamW._settings = settings


def cut_at_four_elements():
    from shardbook.memory.host_adamw import HostAdamW

    real = HostAdamW.__init__

    def init(self, *words, **more):
        real(self, *words, **more)
        self.bucket = 1028

    HostAdamW.__init__ = init


def gradient_added_twice():
    from shardbook.memory.host_adamw import HostAdamW

    real = HostAdamW._accumulate

    def accumulate(self, *given):
        real(self, *given)
        *_, is_first, _ = given
        if not is_first:
            real(self, *given)

    HostAdamW._accumulate = accumulate


def torn_bucket():
    from shardbook.memory.direct_io import DirectFile

    real = DirectFile.read

    def read(self, into, offset):
        half = len(into) // 2 // 4096 * 4096
        real(self, into[: half or len(into)], offset)

    DirectFile.read = read


def gathered_before_it_was_written():
    import time

    from shardbook.memory.host_adamw import HostAdamW

    gather, step = HostAdamW.gather, HostAdamW._step

    def stepped(self, *words):
        time.sleep(0.2)
        step(self, *words)

    def impatient(self, unit, number):
        ready, unit.ready = unit.ready, None
        found = gather(self, unit, number)
        unit.ready = ready
        return found

    HostAdamW.gather, HostAdamW._step = impatient, stepped


def staging_filled_again_too_early():
    import time

    from shardbook.memory.host_adamw import HostAdamW

    receive, accumulate = HostAdamW.receive, HostAdamW._accumulate

    def impatient(self, unit, flat):
        self.stagings[0].accumulated = None
        receive(self, unit, flat)

    def late(self, *words):
        time.sleep(0.05)
        accumulate(self, *words)

    HostAdamW.receive, HostAdamW._accumulate = impatient, late


PLANTED = {
    staging_filled_again_too_early: "cpu-none",
    shards_of_the_step_before: "nvme-nvme",
    rate_of_the_step_before: "cpu-cpu",
    cut_at_four_elements: "cpu-none",
    gradient_added_twice: "cpu-none",
    torn_bucket: "nvme-none",
    gathered_before_it_was_written: "cpu-cpu",
}


def train_planted(bug, recipe, runs):
    bug()
    return train_all(recipe, runs)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [*PLANTED], ids=lambda bug: bug.__name__)
def test_a_planted_bug_turns_it_red(recipe, disk, bug):
    """And without it the same tier is green: the test above."""
    words = (*COMMON, *STAGES["zero3"], *RUNS["three"], "optim.warmup_steps=3")
    none, name = f"planted-{bug.__name__}-none", f"planted-{bug.__name__}"
    runs = {none: [word for word in words if not word.startswith("offload")]}
    of_none = run_world(2, train_all, recipe, runs)
    of_tier = run_world(2, train_planted, bug, recipe, {name: [*words, *dict(tiers("zero3", disk))[PLANTED[bug]]]})
    assert any(mine[name][0] != theirs[none][0] for mine, theirs in zip(of_tier, of_none, strict=True))
