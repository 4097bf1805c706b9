"""What offload needs of a machine: counted before anything is taken, and refused in one line where it is not there."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from plans import lay_out, settings
from world import run_world

from shardbook.memory import host_adamw, host_state
from shardbook.memory.host_state import ALIGN, STAGINGS, offloaded_bytes, plan_unit, staging_bytes
from shardbook.plan.peak import predict_moments, predict_peak
from shardbook.recipe import Offload, RecipeError


def laid_out(world=4, parallel=None, train=None, **tiers):
    recipe = settings(offload=tiers, parallel=parallel or {}, **({"train": train} if train else {}))
    layout, made = lay_out(recipe, world)
    return replace(layout, offload=recipe.offload), made, recipe


def test_a_parameter_begins_at_a_page_and_trained_ones_come_first():
    layout, _, _ = laid_out(optimizer="cpu")
    for unit in layout.units:
        plan = plan_unit(layout, unit, 0)
        assert all(slot.start % ALIGN == 0 for slot in plan.slots)
        assert plan.buffers["masters"] == (plan.trained * 4, "cpu")
        assert plan.reduced == plan.gathered == unit.padded_numel(4) // 4


@pytest.mark.parametrize(("optimizer", "params"), [("cpu", "none"), ("cpu", "cpu"), ("nvme", "none"), ("nvme", "nvme")])
def test_tiers_take_what_the_table_says(optimizer, params):
    path = {"path": "/scratch"} if optimizer == "nvme" else {}
    layout, made, recipe = laid_out(optimizer=optimizer, params=params, **path)
    share = sum(unit.numel for unit in layout.units) / 4
    sizes = offloaded_bytes(layout, 0)
    sizes["host"] -= STAGINGS * staging_bytes(layout)
    padding = 1024 * 4 * 5 * sum(len(unit.shapes) for unit in layout.units)
    wanted = {"host": 4 if optimizer == "nvme" else 16, "disk": 12 if optimizer == "nvme" else 0}
    if params != "none":
        wanted["disk" if params == "nvme" else "host"] += 2
    for where, a_parameter in wanted.items():
        assert 0 <= sizes.get(where, 0) - a_parameter * share <= padding
    peak = predict_peak(layout, made, recipe)
    assert (peak.params > 0) == (params == "none") and peak.optimizer == 0


def test_too_little_memory_or_disk_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(host_state, "available_memory", lambda: 10**6)
    layout, _, _ = laid_out(optimizer="cpu")
    with pytest.raises(RecipeError, match=r"this machine's memory are needed for 4 ranks and 0\.0 can be had; set"):
        host_state.check_room(layout.offload, [offloaded_bytes(layout, rank) for rank in range(4)])
    monkeypatch.setattr(host_state, "available_memory", lambda: 10**12)
    monkeypatch.setattr(host_state, "free_bytes", lambda folder: 10**6)
    layout, _, _ = laid_out(optimizer="nvme", path=str(tmp_path))
    with pytest.raises(RecipeError, match=r"GB are needed for 4 ranks and 0\.0 are free; choose another disk"):
        host_state.check_room(layout.offload, [offloaded_bytes(layout, rank) for rank in range(4)])


def test_a_node_needs_what_all_its_ranks_do(monkeypatch):
    """Stages of a pipeline need unlike amounts: not as many times the first rank's as there are ranks."""
    monkeypatch.setattr(host_state, "available_memory", lambda: 5 * 10**9)
    sizes = [{"host": size * 10**9} for size in (3, 1)]
    host_state.check_room(Offload(optimizer="cpu"), sizes)
    with pytest.raises(RecipeError, match=r"7\.0 GB of this machine's memory are needed for 3 ranks and 4\.8 can"):
        host_state.check_room(Offload(optimizer="cpu"), [*sizes, sizes[0]])


def materialize_late(layout, folder):
    """Rank 1 comes late to the check: by then rank 0 of before had reserved, which is all that is free."""
    import time

    from shardbook.ranks.distributed import start_distributed

    rank, taken, said = start_distributed().rank, folder / "taken", []
    real = host_state.free_bytes, host_state.available_memory, host_adamw.DirectFile, host_adamw.build_host_adamw

    def attempt(free, memory, reserve):
        host_state.free_bytes, host_state.available_memory = lambda folder: free(), memory
        host_adamw.DirectFile, host_adamw.materialize = reserve, lambda *words: None
        host_adamw.build_host_adamw = lambda *words: "made"
        try:
            said.append(host_adamw.offload_state(None, SimpleNamespace(layout=layout, chunks=[]), None, None))
        except RecipeError as error:
            said.append(str(error))

    def free():
        time.sleep(0.3 * rank)
        return 0 if taken.exists() else 10**12

    def reserve(*words):
        if rank == 1:
            raise RecipeError("offload.path: planted on rank 1")

    attempt(free, lambda: 10**12, lambda *words: taken.touch())
    attempt(lambda: 10**12 * rank, lambda: 10**12, lambda *words: None)
    attempt(lambda: 10**12, lambda: 10**12, reserve)
    host_state.os.sched_getaffinity = lambda _: range(8 * rank, 8 * rank + 8)  # a launcher gave each its own
    said.append(host_state.threads_here(2, "cuda"))
    host_state.free_bytes, host_state.available_memory, host_adamw.DirectFile, host_adamw.build_host_adamw = real
    return said


def test_a_node_decides_once_and_all_ranks_say_the_same(tmp_path):
    """Before anyone reserves: who asks late would see what the others took as gone. And the cores of one rank."""
    layout, _, _ = laid_out(world=2, optimizer="nvme", path=str(tmp_path))
    first, second = run_world(2, materialize_late, replace(layout, units=tuple(map(bare, layout.units))), tmp_path)
    assert first == second
    assert first[0] == "made" and "0.0 are free; choose another disk" in first[1]
    assert first[2] == "offload.path: planted on rank 1" and first[3] == 8


def bare(unit):
    """Without its modules, which another process has no use for."""
    return replace(unit, modules=())


GROUPS = {  # what a group allows, has, and of that is of files not read lately, by its path below /sys/fs/cgroup
    "none": ("0::/\n", {}, 900),
    "its own": ("0::/slurm/job_7\n", {"slurm/job_7": (500, 300, 100)}, 300),
    "one around it": ("0::/slurm/job_7\n", {"slurm": (400, 300, 50), "slurm/job_7": ("max", 300, 0)}, 150),
    "a container": ("0::/\n", {"": (500, 450, 400)}, 450),
    "version 1": ("4:memory:/job\n3:cpuset:/other\n0::/\n", {"memory/job": (500, 300, 100)}, 300),
    "version 1 in a container": ("9:cpu,memory:/docker/abc\n", {"memory": (350, 300, 0)}, 50),
    "version 1 without a limit": ("4:memory:/\n", {"memory": (2**63 - 4096, 300, 0)}, 900),
}


@pytest.mark.parametrize("case", [*GROUPS])
def test_what_control_groups_allow(tmp_path, case):
    own, groups, wanted = GROUPS[case]
    for name, text in (("meminfo", "MemTotal: 1000 kB\nMemAvailable: 900 kB\n"), ("self/cgroup", own)):
        (tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / name).write_text(text)
    for path, (most, used, idle) in groups.items():
        folder = tmp_path / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        limit, usage, key = ("memory.max", "memory.current", "inactive_file")
        if path.startswith("memory"):
            limit, usage, key = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        (folder / limit).write_text(f"{most if most == 'max' or most > 10**9 else most * 1024}\n")
        (folder / usage).write_text(f"{used * 1024}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{key} {idle * 1024}\n")
    assert host_state.available_memory(tmp_path) == wanted * 1024


def test_what_the_kernel_says_is_available():
    assert 10**8 < host_state.available_memory() < 10**14


def test_what_waits_on_the_device_is_in_the_peak():
    """Gradients on their way to the host; across replicas those that fully_shard keeps; shards fetched a unit ahead."""
    micros = {"steps": 1, "gradient_accumulation_steps": 2}
    layout, made, recipe = laid_out(optimizer="cpu", train=micros)
    moments = predict_moments(layout, made, recipe)
    ends = [found.grads for name, found in moments.items() if name.endswith("end, reduced")]
    # an fp32 shard of each of the two blocks before it, and of the embedding, whose gradient in bf16 is still there
    # (that of the norm beside it is gone)
    gone = 2 * layout.units[0].shapes[0].numel()
    assert ends == [sum(unit.padded_numel(4) for unit in layout.units[:3]) - gone] * 2
    hybrid = {"stage": "hsdp", "dp_shard_size": 2}
    layout, made, recipe = laid_out(optimizer="cpu", parallel=hybrid, train=micros)
    whole = sum(unit.padded_numel(2) for unit in layout.units) // 2 * 4
    moments = predict_moments(layout, made, recipe)
    assert moments["micro-batch 2, loss"].grads == whole  # of the first, in the dtype of reduction
    for world, times in ((1, 2), (4, 1)):
        here, made, recipe = laid_out(world, optimizer="cpu")
        away = replace(here, offload=here.offload.model_copy(update={"params": "cpu"}))
        most = max(unit.padded_numel(world) for unit in here.units) // world * 2
        more = predict_peak(away, made, recipe).buffers - predict_peak(here, made, recipe).buffers
        assert 0 <= more - times * most < times * 4096


def test_a_tier_further_out_than_its_masters_is_no_section():
    with pytest.raises(ValueError, match="lies further out"):
        Offload(optimizer="cpu", params="nvme", path="/scratch")
