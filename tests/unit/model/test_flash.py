"""FlashAttention 3 and 4: torch's own switch is thrown where GPU, package, heads and recipe allow it, and facts say so.

The switch is torch's; what it would register, a kernel for a GPU, is a stand-in that counts.
"""

import json
from importlib.util import find_spec

import pytest
import torch
import torch.nn.attention as switch
from tiny import write_model
from torch.torch_version import TorchVersion

from shardbook.model import flash
from shardbook.parallel.placement import World
from shardbook.recipe import load_recipe
from shardbook.run import directory
from shardbook.run.checkpoint.format import StoredCheckpoint
from shardbook.run.checkpoint.load import other_bits
from shardbook.run.prepare import place_run

GPU = torch.device("cuda")
MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}
NEW = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 keeps FA2")


class Handle:
    def remove(self):
        pass


@pytest.fixture
def activated(monkeypatch):
    """The names that torch was switched to, in order."""
    from torch.nn.attention._fa3 import register_flash_attention_fa3
    from torch.nn.attention._fa4 import register_flash_attention_fa4

    names = []
    for name in MODULES:
        switch.register_flash_attention_impl(name, register_fn=lambda name=name: names.append(name) or Handle())
    yield names
    if switch.current_flash_attention_impl():
        switch.restore_flash_attention_impl()
    switch.register_flash_attention_impl("FA3", register_fn=register_flash_attention_fa3)
    switch.register_flash_attention_impl("FA4", register_fn=register_flash_attention_fa4)


def place(monkeypatch, capability, installed=("FA3", "FA4")):
    """A GPU of this compute capability, and these packages."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    modules = [MODULES[name] for name in installed]

    def find(name, package=None):
        if name in MODULES.values():
            return object() if name in modules else None
        return find_spec(name, package)

    monkeypatch.setattr(flash.importlib.util, "find_spec", find)


@pytest.fixture
def lay_out(tmp_path):
    """Lays a run out on the GPU as `shardbook train` does."""
    folder = write_model(tmp_path / "model")
    (tmp_path / "recipe.toml").write_text("")

    def laid(*words):
        given = [
            f"model.path={folder}",
            "data.train=rows.jsonl",
            "precision.params=bf16",
            "train.steps=1",
            "data.max_length=256",
            *words,
        ]
        return place_run(load_recipe(tmp_path / "recipe.toml", given), World(1, 1, 0, GPU))

    return laid


@NEW
def test_a_run_switches_once(monkeypatch, activated, lay_out):
    place(monkeypatch, (9, 0))
    assert flash.current_flash() == "FA2"
    for _ in range(2):  # two runs of a process
        assert lay_out().attention.name == "varlen"
    assert activated == ["FA3"] and flash.current_flash() == "FA3"


@NEW
def test_what_ran_before_decides_nothing(monkeypatch, activated, lay_out):
    place(monkeypatch, (9, 0))
    lay_out()
    lay_out("train.deterministic=true")
    assert activated == ["FA3"] and flash.current_flash() == "FA2"


@NEW
def test_a_package_that_torch_cannot_use_is_one_line(monkeypatch, activated, lay_out, capsys):
    def fail():
        raise ImportError("libcudart.so.12: cannot open shared object file\nsecond line")

    place(monkeypatch, (9, 0))
    switch.register_flash_attention_impl("FA3", register_fn=fail)
    lay_out()
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert warned == [
        "warning  FA3 is installed, but torch cannot use it (ImportError: libcudart.so.12: cannot open shared object "
        "file); attention runs by FA2"
    ]
    assert flash.current_flash() == "FA2"


@pytest.mark.parametrize(
    ("capability", "installed", "words"),
    [
        ((9, 0), ["FA4"], []),
        ((10, 0), ["FA3"], []),
        ((8, 0), ["FA3", "FA4"], []),
        ((12, 0), ["FA3", "FA4"], []),
        ((9, 0), ["FA3"], ["train.deterministic=true"]),
        ((9, 0), ["FA3"], ["model.attention=sdpa"]),
    ],
    ids=["no-FA3", "no-FA4", "ampere", "rtx-blackwell", "deterministic", "sdpa"],
)
def test_a_run_keeps_torchs_own(monkeypatch, activated, lay_out, capability, installed, words):
    place(monkeypatch, capability, installed)
    lay_out(*words)
    assert activated == [] and flash.current_flash() == "FA2"


@NEW
@pytest.mark.parametrize(
    ("capability", "head_size", "name"),
    [
        ((9, 0), 256, "FA3"),
        ((10, 0), 128, "FA4"),
        ((10, 3), 64, "FA4"),
        ((10, 0), 256, "FA2"),  # heads that FA4 does not take
    ],
)
def test_gpu_and_heads_choose(monkeypatch, capability, head_size, name):
    place(monkeypatch, capability)
    assert flash.choose_flash("varlen", head_size, GPU, False) == name
    assert flash.choose_flash("varlen", head_size, torch.device("cpu"), False) == "FA2"


def test_a_torch_before_2_13_keeps_its_own(monkeypatch, activated, lay_out):
    """It has a switch too, but its FA4 refuses varlen's backward."""
    place(monkeypatch, (9, 0))
    if torch.__version__ >= "2.13":
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    lay_out()
    assert activated == [] and flash.current_flash() == "FA2"


def test_a_torch_without_the_switch_keeps_its_own(monkeypatch, lay_out):
    place(monkeypatch, (9, 0))
    for name in ("activate", "current", "restore"):
        monkeypatch.delattr(switch, f"{name}_flash_attention_impl")
    lay_out()
    assert flash.current_flash() == "FA2"


def test_a_package_inside_one_that_is_not_there_is_not_found():
    assert not flash._is_installed("no_such_package.cute.interface")


@NEW
def test_facts_hold_the_name(monkeypatch, activated, lay_out, tmp_path):
    directory.environment()  # read before this machine seems to have a GPU
    place(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run = directory.RunDirectory("named", tmp_path / "named", finished_steps=0, is_held=False)
    run.path.mkdir()
    for words, name in (["train.deterministic=true"], "FA2"), ([], "FA3"):
        run.record(tmp_path / "recipe.toml", lay_out(*words).recipe, {})
        assert json.loads((run.path / "run.json").read_text())["flash_attention"] == name


@NEW
def test_a_checkpoint_of_another_one_is_said(monkeypatch, activated, lay_out):
    place(monkeypatch, (9, 0))
    by_fa3 = StoredCheckpoint({"flash_attention": "FA3"}, {})
    by_fa2 = StoredCheckpoint({"flash_attention": "FA2"}, {})
    assert other_bits(by_fa3) == "flash attention ran by FA3 there, runs by FA2 here, so bits differ"
    assert other_bits(by_fa2) == ""
    lay_out()
    assert other_bits(by_fa3) == ""
    assert other_bits(by_fa2) == "flash attention ran by FA2 there, runs by FA3 here, so bits differ"
