"""Loading weights: each rank's memory grows by its shard and at most one more tensor, measured by the kernel."""

import dataclasses
import os

import pytest
import torch
from tiny import config, tokenizer
from transformers import AutoModelForCausalLM
from world import run_world

MIB = 2**20
SLACK = 6 * MIB  # of the Python heap, headers and the allocator; a quarter of the largest tensor


def load(folder, *words):
    """Peak growth of resident memory while loading, this rank's shard, the largest tensor, and this rank's part of the
    largest, in bytes."""
    import gc
    from pathlib import Path

    from shardbook.cli import PLAIN
    from shardbook.model.causal_lm import materialize
    from shardbook.model.families import load_config
    from shardbook.model.weights import load_weights
    from shardbook.parallel.mesh import build_mesh
    from shardbook.parallel.placement import World, build_local, layout_of
    from shardbook.parallel.sharding import apply_stage
    from shardbook.ranks.distributed import start_distributed
    from shardbook.recipe import parse_recipe, resolve_precision
    from shardbook.run.log.memory import kept_bytes

    os.environ["MALLOC_MMAP_MAX_"] = "65536"  # the rank leaves glibc as it comes: what is freed is not resident
    ranks = start_distributed()
    recipe = resolve_precision(parse_recipe(PLAIN, "test", [f"model.path={folder}", *words]), "cpu")
    local = build_local(recipe, load_config(recipe.model, folder, 64), rank=ranks.rank)
    model, layout = local.model, layout_of(recipe, local, World(ranks.world_size, ranks.ranks_per_node))
    apply_stage(model, layout, build_mesh(layout.sizes, "cpu"))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (VmHWM) to what is resident now
    before = resident("VmHWM")
    materialize(model, ranks.device)
    load_weights(model, folder)
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    part = max(kept_bytes([p]) for p in model.parameters())
    return resident("VmHWM") - before, kept_bytes(model.parameters()), largest, part


def resident(field: str) -> int:
    from pathlib import Path

    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def ask_family(folder):
    """The self-check reads tensors of a small model, in memory: before something is planted, or counted."""
    from shardbook.model.families import load_config
    from shardbook.model.selfcheck import check_family
    from shardbook.recipe import Model

    check_family(load_config(Model(path=str(folder)), folder, 64))


def whole_first(folder):
    """Planted bug: every rank reads whole tensors, and keeps them."""
    from shardbook.model.weight_files import StoredTensor

    ask_family(folder)
    read, kept = StoredTensor.read_rows, []

    def greedy(stored, rows):
        kept.append(read(stored, slice(0, stored.shape[0])))
        return kept[-1][rows]

    StoredTensor.read_rows = greedy
    return load(folder)


def mapped(folder):
    """Planted bug: the library's mapping of a file, kept while it is needed: what was read stays resident."""
    from safetensors import safe_open

    from shardbook.model.weight_files import StoredTensor

    ask_family(folder)
    opened = {}

    def read_rows(stored, rows):
        file = opened.setdefault(stored.path, safe_open(stored.path, "pt"))
        name = next(name for name in file.keys() if tuple(file.get_slice(name).get_shape()) == stored.shape)  # noqa: SIM118
        kept.append((file.get_slice(name)[rows] * 1).sum())
        return torch.zeros(rows.stop - rows.start, *stored.shape[1:])

    kept = []
    StoredTensor.read_rows = read_rows
    return load(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model of 26 million parameters in four files or more, beside its tokenizer."""
    folder = tmp_path_factory.mktemp("files")
    made = config(hidden_size=512, intermediate_size=2048, num_hidden_layers=6, vocab=12_000, num_attention_heads=8)
    AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(folder, max_shard_size="30MB")
    tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) >= 4
    return folder


def test_peak_memory_of_loading(files):
    for peak, shard, largest, _ in run_world(2, load, files):
        assert shard > 2 * largest and largest > 20 * MIB  # the bound below tells one tensor from two
        assert peak <= shard + largest + SLACK, f"{peak / MIB:.0f} MiB"
        print(f"peak {peak / MIB:.1f} MiB: shard {shard / MIB:.1f}, largest tensor {largest / MIB:.1f}")


def test_peak_memory_of_quantising(files):
    """A slice of a matrix in fp32, its shares, codes and halves are less than the largest tensor, the embedding's."""
    for peak, shard, largest, _ in run_world(2, load, files, "lora.r=4", "model.load_in_4bit=true"):
        assert shard < 23 * MIB and largest > 20 * MIB  # half of 24 for the embedding, and a seventh of 72
        assert peak <= shard + largest + SLACK, f"{peak / MIB:.0f} MiB"


@pytest.mark.slow
@pytest.mark.parametrize("bug", [whole_first, pytest.param(mapped, marks=pytest.mark.slow)])
def test_what_stays_in_memory_turns_it_red(files, bug):
    for peak, shard, largest, _ in run_world(2, bug, files):
        assert peak > shard + largest + SLACK


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose matrices of 24 MiB are most of it."""
    folder = tmp_path_factory.mktemp("wide")
    made = config(hidden_size=512, intermediate_size=12_288, num_hidden_layers=2, vocab=1_000, num_attention_heads=8)
    AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def load_columns(folder, bug):
    import ctypes

    from shardbook.model import weight_files

    weight_files.PIECE = MIB
    # M_MMAP_THRESHOLD: else glibc raises it with each large block that is freed, and sometimes a hole of 12 MiB stays
    ctypes.CDLL(None).mallopt(-3, MIB // 2)
    bug and bug(weight_files.StoredTensor)
    return load(folder, "parallel.tp_size=2")


def whole_rows_at_once(kind):
    """Planted bug: columns are cut from all of the rows."""

    def read_part(stored, rows, columns=None):
        read = stored.read_rows(rows)
        return read if columns is None else read[:, columns]

    kind.read_part = read_part


def test_peak_memory_of_loading_columns(wide):
    """What tensor parallel cuts: the rank's part of a matrix, and a piece of the file."""
    for peak, shard, largest, part in run_world(2, load_columns, wide, None):
        assert largest == 24 * MIB == 2 * part and shard > 5 * part
        assert peak <= shard + part + MIB + SLACK, f"{peak / MIB:.0f} MiB"
        print(f"peak {peak / MIB:.1f} MiB: shard {shard / MIB:.1f}, largest part {part / MIB:.1f}")


@pytest.mark.slow
def test_whole_rows_turn_it_red(wide):
    for peak, shard, _, part in run_world(2, load_columns, wide, whole_rows_at_once):
        assert peak > shard + part + MIB + SLACK
        print(f"peak {peak / MIB:.1f} MiB: shard {shard / MIB:.1f}, largest part {part / MIB:.1f}")


def load_counting(folder, bug):
    """Names of the weights files in the order of their opens; those open while rows are read; files still mapped; bytes
    read, by the kernel's count; bytes that this rank's rows are; whether they are the file's, by torch.chunk."""
    import os
    import sys
    from pathlib import Path

    from safetensors.torch import load_file

    from shardbook.model import weight_files, weights
    from shardbook.model.weight_files import StoredTensor

    ask_family(folder)
    opened, held, own, counting = [], [], [], []
    bug and bug(weight_files, weights)
    read = StoredTensor.read_rows

    def watched(tensor, rows):
        links = list(Path("/proc/self/fd").iterdir())
        held.append(sorted(name for link in links if (name := ending(link)).endswith(".safetensors")))
        own.append((rows.stop - rows.start) * tensor.shape[-1] ** (len(tensor.shape) - 1) * 4)
        return read(tensor, rows)

    def ending(link):
        try:
            return link.readlink().name
        except OSError:  # of the listing itself
            return ""

    def hook(event, given):
        if counting and event == "open" and str(given[0]).endswith(".safetensors"):
            opened.append(Path(given[0]).name)

    def fill(model, folder):
        counting.append(1)
        before = characters_read()
        fill_weights(model, folder)
        counting.clear()
        read_bytes.append(characters_read() - before)
        rank, wanted = int(os.environ["RANK"]), {}
        for path in folder.glob("*.safetensors"):
            wanted |= {name: tensor.chunk(2)[rank] for name, tensor in load_file(path).items()}
        right.append(all(torch.equal(p.to_local(), wanted[name]) for name, p in model.named_parameters()))

    read_bytes, right, fill_weights = [], [], weights.load_weights
    StoredTensor.read_rows, weights.load_weights = watched, fill
    sys.addaudithook(hook)
    load(folder)
    mapped = sum(".safetensors" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return opened, held, mapped, read_bytes[0], sum(own), right == [True]


def characters_read():
    from pathlib import Path

    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


def opens_for_each_tensor(weight_files, weights):
    """Planted bug: what loading did before: a file is opened for the rows of each tensor."""

    def read_rows(tensor, rows):
        with tensor.path.open("rb", buffering=0) as file:
            return read(dataclasses.replace(tensor, file=file), rows)

    read = weight_files.StoredTensor.read_rows
    weight_files.StoredTensor.read_rows = read_rows


def reads_all_rows(weight_files, weights):
    """Planted bug: the whole tensor is read, and cut."""
    read = weight_files.StoredTensor.read_rows
    weight_files.StoredTensor.read_rows = lambda tensor, rows: read(tensor, slice(0, tensor.shape[0]))[rows]


def rows_of_another_rank(weight_files, weights):
    """Planted bug: each rank reads the other one's rows."""
    real = weights.local_slices

    def local_slices(parameter):
        local, rows, columns = real(parameter)
        start = 0 if rows.start else len(local)
        return local, slice(start, start + len(local)), columns

    weights.local_slices = local_slices


def test_each_file_is_opened_once_and_only_own_rows_are_read(files):
    names = sorted(path.name for path in files.glob("*.safetensors"))
    whole = sum((files / name).stat().st_size for name in names)
    for opened, held, mapped, read_bytes, own, right in run_world(2, load_counting, files, None):
        assert right
        assert opened == names  # each once, in order
        assert held and all(each == names for each in held) and mapped == 0
        # headers and the index beside the rows: some 20 kB. /proc itself is read for `held`: links are not counted.
        assert own <= read_bytes <= own + 64_000, (read_bytes, own)
        assert abs(own - whole / 2) < 64_000


@pytest.mark.slow
def test_more_opens_and_other_rows_turn_it_red(files):
    for opened, *_ in run_world(2, load_counting, files, opens_for_each_tensor):
        assert len(opened) > len(list(files.glob("*.safetensors"))) + 50
    for *_, read_bytes, own, right in run_world(2, load_counting, files, reads_all_rows):
        assert read_bytes > 1.9 * own and right
    assert [right for *_, right in run_world(2, load_counting, files, rows_of_another_rank)] == [False] * 2
