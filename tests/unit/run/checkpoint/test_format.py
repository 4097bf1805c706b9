"""A checkpoint is whole or not there, whatever ends the save of it; and no byte of it changes unnoticed. One process
writes the files of two ranks in turn."""

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import crashes
import pytest
import torch
from xxhash import xxh3_128

from shardbook.cli import main
from shardbook.ranks.exits import RunFailed
from shardbook.recipe import RecipeError
from shardbook.run.checkpoint import disk, format
from shardbook.run.checkpoint.format import (
    MANIFEST,
    Damaged,
    begin,
    list_checkpoints,
    newest_checkpoint,
    publish,
    read_stored,
    remove_leftovers,
    step_of,
    verify,
    write_items,
)

RANKS = 2
TESTS = Path(__file__).parents[3]


def items_of(step, rank):
    """Items of all sizes: none, a few bytes, more than is joined."""
    for number, size in enumerate((0, 4, 1000, 70_000, 12, 4, 130_000, 8)):
        data = random.Random(f"{step} {rank} {number}").randbytes(size)
        yield [f"tensor.{number}", [rank], [size], [2, size], "uint8"], [memoryview(data)]


def save(folder, step, keep=0, check_held=lambda: None):
    side = begin(folder, step, needed=1)
    written = {}
    for rank in range(RANKS):
        written |= write_items(side, rank, items_of(step, rank))
    publish(side, step, {"step": step, "tokens": 10 * step, "name": "AdamW"}, written, keep, check_held)
    return newest_checkpoint(folder)


def judge(folder):
    """The step of the newest checkpoint, each of which must be whole; 0 without one."""
    found = list_checkpoints(folder)
    for each in found:
        verify(each)
        assert json.loads((each / "state.json").read_text())["step"] == step_of(each)
    return step_of(found[0]) if found else 0


def crash_everywhere(monkeypatch, tmp_path, keep=1, saving=save):
    """Saves steps 1 and 2, keeping one; asserts that each moment leaves exactly the old or exactly the new. Returns the
    number of moments."""
    folder, done = tmp_path / "real" / "checkpoints", [0]
    folder.parent.mkdir()
    made = crashes.record(monkeypatch, folder.parent)
    for step in (1, 2):
        saving(folder, step, keep)
        done.append(len(made))
    monkeypatch.undo()
    seen, count = {}, 0
    for number, how, tree in crashes.moments(made):
        count += 1
        key = hash(tuple(tree.items()))
        if key not in seen:
            crashes.lay_out(tree, tmp_path / f"at-{number}-{how}")
            seen[key] = judge(tmp_path / f"at-{number}-{how}" / "checkpoints")
        least = sum(number >= end for end in done) - 1
        assert seen[key] in (least, min(least + 1, 2)), f"{how} after {number} of {len(made)}: {made[number - 1]}"
    return count


def test_a_crash_at_any_moment_leaves_the_old_or_the_new(monkeypatch, tmp_path):
    count = crash_everywhere(monkeypatch, tmp_path)
    assert count == 3 * (1 + 71), count  # operations of two saves of two ranks and a prune


def test_planted_data_that_is_not_synced(monkeypatch, tmp_path):
    monkeypatch.setattr(disk, "sync", lambda file: None)
    plant(monkeypatch, tmp_path, "sync", lambda *given: None, "names early|power lost")


def test_planted_directories_that_are_not_synced(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, "sync_directory", lambda *given: None, "power lost")


def plant(monkeypatch, tmp_path, name, bug, said):
    """Puts `bug` where the recorder would see the operation."""
    real = crashes.record

    def record(patch, folder):
        made = real(patch, folder)
        patch.setattr(disk, name, bug)
        return made

    crashes.record = record
    try:
        with pytest.raises((AssertionError, Damaged), match=f"{said}|damaged"):
            crash_everywhere(monkeypatch, tmp_path)
    finally:
        crashes.record = real


def test_planted_pruning_before_publishing(monkeypatch, tmp_path):
    def saving(folder, step, keep):
        for old in list_checkpoints(folder):
            disk.rename(old, folder / f"tmp-old-{old.name}")
            disk.sync_directory(folder)
        save(folder, step)

    with pytest.raises(AssertionError, match=r"killed after|power lost after"):
        crash_everywhere(monkeypatch, tmp_path, saving=saving)


def test_planted_manifest_before_the_data_is_durable(monkeypatch, tmp_path):
    late, sync = [], disk.sync

    def saving(folder, step, keep):
        """The .bin files are synced when all is published."""
        real = disk.sync
        disk.sync = lambda file: late.append(os.dup(file)) if is_bin(file) else real(file)
        save(folder, step, keep)
        disk.sync = real

    def is_bin(file):
        return Path(f"/proc/self/fd/{file}").readlink().suffix == ".bin"

    with pytest.raises(Damaged, match=r"rank-\d.bin"):
        crash_everywhere(monkeypatch, tmp_path, saving=saving)
    for file in late:
        os.close(file)
    disk.sync = sync


def fail_at(number, calls, error, real, *given):
    calls.append(real)
    if len(calls) == number:
        raise OSError(error, os.strerror(error))
    return real(*given)


def names_in(folder):
    return sorted(each.name for each in folder.iterdir())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_operation(monkeypatch, tmp_path, error):
    """Either checkpoint is whole, the next try succeeds, and a start removes what is left."""
    names = ("make_directory", "create", "write", "sync", "sync_directory", "rename")
    tried = 0
    for fails_at in range(1, 100):
        folder, calls = tmp_path / str(fails_at), []
        save(folder, 1)
        for name in names:
            real = getattr(disk, name)
            monkeypatch.setattr(disk, name, partial(fail_at, fails_at, calls, error, real))
        try:
            save(folder, 2, keep=1)
        except OSError as met:
            assert met.errno == error
        monkeypatch.undo()
        if len(calls) < fails_at:
            break
        tried += 1
        assert judge(folder) in (1, 2)
        assert save(folder, 3, keep=1).name == "step-000003" and judge(folder) == 3
        assert remove_leftovers(folder) == [] and names_in(folder) == ["step-000003"]
    assert tried == 32, tried


def test_what_was_written_is_said(monkeypatch, tmp_path):
    def full(file, data, real=disk.write):
        if len(data) > 100_000:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        real(file, data)

    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(OSError, match=r"Disk quota exceeded; rank 0 had written 7\.1e-05 GB"):
        save(tmp_path / "new", 1)
    with pytest.raises(OSError, match=r"No space left on device: 1e\+09 GB are needed, .* GB are free"):
        begin(tmp_path / "new", 1, needed=10**18)


# -- damage


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    save(folder, 1)
    save(folder, 2)
    return folder


def found(path) -> bool:
    try:
        verify(path)
    except Damaged as error:
        assert str(error).startswith(f"checkpoint {path}: damaged (") and error.args[0].count("\n") == 0
        return True
    return False


FILES = ("rank-0.bin", "rank-1.bin", "rank-0.items", "rank-1.items", "state.json", "manifest.json")


def flip_bits(path, file, count=128):
    """How many of `count` single bits in a file, one at a time, were found."""
    data, chosen = (path / file).read_bytes(), random.Random(file)
    there = 0
    for _ in range(count):
        bit = chosen.randrange(8 * len(data))
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (path / file).write_bytes(changed)
        there += found(path)
    (path / file).write_bytes(data)
    assert not found(path)
    return there


@pytest.mark.parametrize("file", FILES)
def test_one_bit_anywhere_is_found(two, tmp_path, file):
    path = shutil.copytree(two / "step-000002", tmp_path / "step-000002")
    assert flip_bits(path, file) == 128


def save_tensor(folder, tensor):
    """Writes one tensor as a checkpoint, and returns its path."""
    from shardbook.run.checkpoint.save import write_finite

    side, size = begin(folder, 1, 1), [*tensor.shape]
    head = ["a", [0] * tensor.ndim, size, size, str(tensor.dtype).removeprefix("torch.")]
    publish(side, 1, {}, write_finite(folder, side, 0, [(head, [tensor])]), 0, lambda: None)
    return folder / "step-000001"


def test_planted_hash_of_the_tensor_in_place_of_the_bytes_written(tmp_path, monkeypatch):
    """They differ where a tensor is a part of another: a column's bytes do not lie one after another."""
    from shardbook.run.checkpoint import save as tensors

    column = torch.arange(12.0).reshape(4, 3)[:, 1]
    verify(save_tensor(tmp_path / "good", column))
    real, hashed = tensors.bytes_of, []

    def bytes_of(tensor):
        hashed.append(tensor.untyped_storage().tolist())
        return real(tensor)

    class OfTensor:
        def __init__(self, data=b""):
            self.digest = xxh3_128(data)

        def update(self, piece):
            self.digest.update(bytes(hashed.pop() if hashed else piece))

        def hexdigest(self):
            return self.digest.hexdigest()

    monkeypatch.setattr(tensors, "bytes_of", bytes_of)
    monkeypatch.setattr(format, "xxh3_128", OfTensor)
    assert found(save_tensor(tmp_path / "bad", column))


def test_planted_no_hash_of_what_is_read(two, tmp_path, monkeypatch):
    path = shutil.copytree(two / "step-000002", tmp_path / "step-000002")

    class Any:
        def __eq__(self, other):
            return True

        def __ne__(self, other):
            return False

    rows = format.Item._make
    monkeypatch.setattr(format, "Item", lambda *row: rows([*row[:-1], Any()]))
    assert flip_bits(path, "rank-1.bin") == 0 and flip_bits(path, "rank-1.items") == 128


def test_cuts_zeroed_pages_and_files_of_others_are_found(two, tmp_path):
    path = shutil.copytree(two / "step-000002", tmp_path / "step-000002")
    other, attacks = two / "step-000001", 0
    for file in FILES:
        data = (path / file).read_bytes()
        page = bytearray(data)
        page[: min(4096, len(page) // 2)] = bytes(min(4096, len(page) // 2))
        sibling = file.replace("0", "1") if "-0" in file else file.replace("1", "0")
        foreign = [(other / file).read_bytes()] + ([(path / sibling).read_bytes()] if sibling != file else [])
        for bad in (b"", data[:1], data[: len(data) // 2], data[:-1], data + b"\0", bytes(page), *foreign):
            (path / file).write_bytes(bad)
            assert found(path), (file, len(bad))
            attacks += 1
        (path / file).unlink()
        assert found(path), f"{file} is gone"
        attacks += 1
        (path / file).write_bytes(data)
    state = json.loads((path / "state.json").read_text())
    for name, value in {"step": 3, "tokens": 1, "name": "AdqmW"}.items():
        (path / "state.json").write_text(json.dumps(state | {name: value}, indent=1))
        assert found(path), name
        attacks += 1
    shutil.rmtree(path)
    shutil.copytree(other, path)  # whole, but of another step
    with pytest.raises(Damaged, match=r"manifest.json: of step 1"):
        verify(path)
    for file in FILES:
        (path / file).unlink()
    with pytest.raises(Damaged, match=r"manifest.json: No such file"):
        verify(path)
    assert attacks + 2 == 6 * 8 + 4 + 3 + 2
    with pytest.raises(RecipeError, match=r"incomplete or not a checkpoint \(no manifest.json in it\)"):
        read_stored(tmp_path / "step-000009")


def test_the_tensor_and_the_file_are_named(two, tmp_path):
    path = shutil.copytree(two / "step-000002", tmp_path / "step-000002")
    data = bytearray((path / "rank-1.bin").read_bytes())
    data[1000 + 4 + 5] ^= 1  # in the fourth item, behind 0, 4 and 1,000 bytes
    (path / "rank-1.bin").write_bytes(data)
    with pytest.raises(Damaged, match=r"rank-1.bin: bytes 1004 to 71004, of tensor.3\)"):
        verify(path)


# -- others who write


def test_who_lost_the_lock_publishes_nothing(tmp_path):
    def taken():
        raise RunFailed("another has it")

    save(tmp_path, 1)
    with pytest.raises(RunFailed):
        save(tmp_path, 2, keep=1, check_held=taken)
    assert judge(tmp_path) == 1 and len(remove_leftovers(tmp_path)) == 0 and names_in(tmp_path) == ["step-000001"]


def test_two_launches_of_one_run(tmp_path, monkeypatch):
    """The second is refused; where locks do not reach it, as on some disks of several nodes, the first gives up."""
    from shardbook.recipe import parse_recipe
    from shardbook.run import directory

    words = ["data.train=chitchat", "train.steps=1", f"run.dir={tmp_path}", "run.name=mine"]
    recipe, path = parse_recipe("", "a recipe", words), tmp_path / "tiny.toml"
    (tmp_path / "mine").mkdir()
    first, newest = directory.find_run(recipe, path)
    assert first.path == tmp_path / "mine" and newest is None
    first.check_held()
    with pytest.raises(RecipeError, match=rf"mine: in use by pid {os.getpid()} on .*; wait until that has ended, or"):
        directory.find_run(recipe, path)

    def flock(*given):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(directory.fcntl, "flock", flock)
    directory.find_run(recipe, path)[0].check_held()
    with pytest.raises(RunFailed, match=rf"mine: pid {os.getpid()} on .* has taken it; nothing more is written here"):
        first.check_held()


def wake_up(folder):
    """A rank of a dead run writes the file that it was about to, while its run, started again, saves the same step."""
    asleep = begin(folder, 1, needed=1)
    remove_leftovers(folder)
    side = begin(folder, 1, needed=1)
    written = write_items(side, 0, items_of(1, 0)) | write_items(side, 1, items_of(1, 1))
    try:
        write_items(asleep, 1, items_of(0, 1))
        woken = "wrote"
    except OSError as error:
        woken = type(error).__name__
    publish(side, 1, {"step": 1}, written, 0, lambda: None)
    return woken, found(folder / "step-000001")


def test_a_rank_that_wakes_up_changes_nothing(tmp_path):
    assert wake_up(tmp_path) == ("FileNotFoundError", False)


def test_planted_no_token_and_files_that_are_opened_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(format.secrets, "token_hex", lambda count: "same")
    assert wake_up(tmp_path / "1") == ("FileExistsError", False)  # O_EXCL stops it
    monkeypatch.setattr(disk, "create", lambda path: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    assert wake_up(tmp_path / "2") == ("wrote", True)


def test_a_damaged_checkpoint_is_replaced_and_does_not_count_as_kept(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-000003" / MANIFEST).unlink()
    save(tmp_path, 2, keep=2)  # a run that went back to step 1 is at 2 again, which was there
    assert [each.name for each in list_checkpoints(tmp_path)] == ["step-000003", "step-000002", "step-000001"]
    save(tmp_path, 3, keep=2)
    assert [each.name for each in list_checkpoints(tmp_path)] == ["step-000003", "step-000002"] and judge(tmp_path) == 3
    assert len([*tmp_path.iterdir()]) == 2  # what was replaced is no longer there


def test_the_command_verifies_all_of_a_run(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    for step in (1, 2, 3):
        save(run / "checkpoints", step)
    assert main(["verify", str(run)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2].partition(",")[0] for line in said] == ["whole"] * 3
    (run / "checkpoints" / "step-000002" / "rank-0.bin").unlink()
    assert main(["verify", str(run)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "step-000002: damaged (rank-0.bin: No such file or directory); remove it" in said[1] and len(said) == 3
    real = format.verify  # the run goes on meanwhile, and prunes

    def verify_beside(path):
        shutil.rmtree(run / "checkpoints" / "step-000002", ignore_errors=True)
        return real(path)

    monkeypatch.setattr(format, "verify", verify_beside)
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("step-000002: its run has removed it meanwhile")


def test_a_checkpoint_of_an_earlier_version_is_listed_and_refused(tmp_path, capsys):
    """A run that did not see it would begin anew beside it; and it is not damaged, so no run goes back behind it."""
    run = tmp_path / "run"
    save(run / "checkpoints", 1)
    earlier = run / "checkpoints" / "step-000002"
    earlier.mkdir()
    for file in ("__0_0.distcp", ".metadata", "state.json", "COMPLETE"):
        (earlier / file).touch()
    assert newest_checkpoint(run / "checkpoints") == earlier
    with pytest.raises(RecipeError) as met:
        read_stored(earlier)
    assert not isinstance(met.value, Damaged) and str(met.value) == (
        f"checkpoint {earlier}: of an earlier version (0.1, or 0.2 before its release, wrote *.distcp files), which is "
        "not read, only manifest.json with .items files is; choose another run.name, and set model.path to an export "
        "by the version that wrote it"
    )
    assert main(["verify", str(run)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == str(met.value) and said[1].startswith(f"checkpoint {run}/checkpoints/step-000001: whole, ")
    assert main(["verify", str(tmp_path)]) == 2
    assert f"{tmp_path}: has no checkpoint" in capsys.readouterr().err


def rewrite_manifest(path, **changes):
    """Changes keys of a manifest (None: removes one) as who wrote it would have: its first line is the hash."""
    manifest = json.loads((path / MANIFEST).read_text()) | changes
    manifest = {key: value for key, value in manifest.items() if value is not None and key != "xxh3_128"}
    body = json.dumps(manifest)[1:].encode()
    (path / MANIFEST).write_bytes(f'{{"xxh3_128": "{xxh3_128(body).hexdigest()}",\n'.encode() + body)


def test_files_of_another_version_are_refused(tmp_path):
    """In one line, not as damage; files that name no version, as those of before did, are of the first."""
    path = save(tmp_path, 1)
    assert json.loads((path / MANIFEST).read_text())["version"] == 1
    rewrite_manifest(path, version=None)
    verify(path)
    rewrite_manifest(path, version=2)
    with pytest.raises(RecipeError) as met:
        verify(path)
    assert not isinstance(met.value, Damaged) and str(met.value) == (
        f"checkpoint {path}: its files are of version 2, and version 1 is read; go on with the Shardbook that wrote "
        "it, or set model.path to an export by that one and choose another run.name"
    )


def test_the_command_imports_no_torch():
    code = "import sys, shardbook.run.checkpoint.format; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


RECORDED = """
import json, sys
from pathlib import Path
import pytest
sys.path[:0] = {paths!r}
import crashes
from unit.run.checkpoint.test_format import save
folder = Path(sys.argv[1])
folder.mkdir()
made = crashes.record(pytest.MonkeyPatch(), folder)
for step in (1, 2):
    save(folder, step, keep=1)
made = [each for each in made if each[0] != "sync"]
print(json.dumps([each[0] if each[0] == "write" else [*each][: 2 + (each[0] == "rename")] for each in made]))
"""
CALLS = {
    "mkdir": "make_directory",
    "openat": "create",
    "rename": "rename",
    "unlink": "remove",
    "rmdir": "remove_directory",
}


@pytest.mark.slow
def test_the_recorder_sees_every_operation(tmp_path):
    """As the kernel saw them (strace): else a crash point between two of them would not be tried."""
    folder, log = tmp_path.resolve() / "run", tmp_path / "log"
    calls = (
        "trace=mkdir,openat,write,pwrite64,fsync,fdatasync,ftruncate,rename,renameat,renameat2,unlink,unlinkat,rmdir"
    )
    code = RECORDED.format(paths=[str(TESTS), str(TESTS / "support")])
    command = ["strace", "-f", "-y", "-s", "0", "-o", str(log), "-e", calls, sys.executable, "-c", code, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no strace")
    if "ptrace" in done.stderr:
        pytest.skip("ptrace is forbidden")
    seen, synced = [], []
    for line in log.read_text().splitlines():
        if str(folder) not in line or line.rstrip().endswith("(No such file or directory)"):
            continue
        name, words = re.match(r"\d+ +(\w+)\((.*)", line).groups()
        paths = [each.removeprefix(f"{folder}/") for each in re.findall(rf'{folder}[^">]*', words)]
        if (name == "openat" and "O_CREAT" not in words) or (paths == [str(folder)] and name == "mkdir"):
            continue
        if name == "write":
            seen.append("write")
        elif name in ("fsync", "fdatasync"):
            synced.append(paths[0])
            if Path(paths[0]).suffix not in (".bin", ".items", ".json"):
                seen.append(["sync_directory", paths[0].replace(str(folder), ".")])
        else:
            seen.append([CALLS.get(name, name), *paths[-2 if name == "rename" else -1 :]])
    assert done.returncode == 0 and seen == json.loads(done.stdout), (done.stderr, seen)
    assert len(seen) + len([each for each in synced if "." in each]) == 69
