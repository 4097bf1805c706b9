"""The run directory: its name, its files at the start, and whether the run in it has finished.

`recipe.toml` is the file as given, `resolved.toml` every key with defaults, `run.json` the facts beyond the recipe that
numbers depend on. The same `run.name` means the same directory, and continues it. `lock` names the running process.
"""

import contextlib
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import tomllib
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import shardbook
from shardbook.model.flash import current_flash
from shardbook.paths import write_whole
from shardbook.ranks.distributed import broadcast_from_main, leave_hangs_in
from shardbook.ranks.exits import RunFailed
from shardbook.recipe import Recipe, RecipeError, Run, dump_recipe, first_line, flatten_recipe
from shardbook.recipe.gone import GONE, find_gone
from shardbook.run.checkpoint.disk import sync_directory
from shardbook.run.checkpoint.format import in_gb, list_checkpoints, newest_checkpoint, remove_leftovers, step_of
from shardbook.terminal import print_line

DAY = "chat_template_date"  # in run.json, and in the recipe's [data]
PACKAGES = ("transformers", "datasets", "accelerate", "safetensors")


@dataclass(frozen=True)
class RunDirectory:
    name: str
    path: Path
    finished_steps: int  # 0: not finished
    is_held: bool  # locked by this process; a directory that is yet to be made is not
    token: str = ""  # of this launch, in the lock
    day: str = ""  # that its chat template reads

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        return self.path / "export"

    def open(self, keep: int, saved: int, day: str) -> None:
        """Removes what dead saves left, looks for room for checkpoints of `saved` bytes (0: for none), makes the
        directory, locks it until this process ends, and writes the `day` that its chat template reads, if any: a run
        may be stopped before its first step. Raises RecipeError."""
        for line in remove_leftovers(self.checkpoints) if self.is_held else ():
            print_line(line)
        if saved:
            self._check_room(keep, saved)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            sync_directory(self.path.parent)  # else a power loss takes the run with all its checkpoints
            if not self.is_held:
                _hold(self.path, self.token)
            tempfile.TemporaryFile(dir=self.path).close()
            if day and (facts := read_facts(self.path)).get(DAY) != day:
                _write_facts(self.path, facts | {DAY: day})
        except OSError as error:
            raise _unwritable(self.path, error.strerror or first_line(error)) from None

    def _check_room(self, keep: int, saved: int) -> None:
        """Looks at the disk: there must be one checkpoint to go back to beside the one that is written."""
        if keep == 1:
            reason = "a damaged checkpoint leaves none to go back to; set it to 2"
            print_line(f"warning  train.save_total_limit = 1: {reason}")
        count = max(1, 2 - len(list_checkpoints(self.checkpoints)))
        parent = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if (free := shutil.disk_usage(parent).free) < count * saved:
            raise RecipeError(
                f"run directory {self.path}: {in_gb(free)} are free there, and {count} checkpoints of "
                f"{in_gb(saved)} will be written; free some, set run.dir to another disk, or train.save_steps=0"
            )

    def record(self, recipe_path: Path, recipe: Recipe, facts: dict[str, Any]) -> None:
        """Writes the recipe and `facts` just before the first step: a refused continuation changes nothing."""
        if (self.path / "recipe.toml").resolve() != recipe_path.resolve():
            shutil.copyfile(recipe_path, self.path / "recipe.toml")
        flash = {"flash_attention": current_flash()} if torch.cuda.is_available() else {}
        day = {DAY: recipe.data.chat_template_date} if recipe.data.chat_template_date else {}
        versions = environment() | {"python": platform.python_version()} | git_revision()
        _write_facts(self.path, versions | flash | facts | day | {"finished_steps": 0})
        write_whole(self.path / "resolved.toml", dump_recipe(recipe))  # last: where it exists, the others do

    def check_held(self) -> None:
        """Raises RunFailed where another launch has the run by now: a lock does not reach every node of every disk, and
        a process that slept may wake up after it."""
        holder = _read_lock(self.path)
        if self.token and holder and holder[-1] != self.token:
            raise RunFailed(f"run directory {self.path}: {holder[0]} has taken it; nothing more is written here")

    def is_saved(self, newest: Path | None) -> bool:
        """Returns whether the `newest` checkpoint has all steps that the run finished."""
        return newest is not None and step_of(newest) >= self.finished_steps

    def check_goes_on(self, steps: int, newest: Path | None, recipe: Recipe) -> None:
        """Raises RecipeError where the run cannot continue to `steps`: it is finished, and its `newest` checkpoint is
        not of its end, or beyond `steps`; or this `recipe` minimizes another loss than the run."""
        if self.finished_steps and not self.is_saved(newest):
            earlier = f", with train.resume_from_checkpoint={newest} to go on from there" if newest else ""
            raise RecipeError(
                f"run {self.path} finished at step {self.finished_steps} without a checkpoint of it to go on from, "
                f"to {steps}; choose another run.name{earlier}"
            )
        if newest and step_of(newest) > steps:
            ends = f"its newest checkpoint is of step {step_of(newest)}, and the recipe ends at step {steps}"
            raise RecipeError(f"run {self.path}: {ends}; raise train.steps, or choose another run.name")
        resolved = _read_resolved(self.path / "resolved.toml") if newest else {}
        gone = find_gone(resolved)
        for name, (default, way_out) in GONE.items():
            if gone.get(name, default) != default:
                raise RecipeError(
                    f"run {self.path}: {name} was {gone[name]!r} there, which is not a key any more ({way_out}); "
                    f"choose another run.name, with train.resume_from_checkpoint={newest} to go on from there"
                )
        now = flatten_recipe(recipe)
        for name, value in _minimised(resolved).items():
            if now.get(name, value) != value:
                raise RecipeError(
                    f"run {self.path}: {name} was {value!r} there, is {now[name]!r} here; a run keeps what it "
                    "minimises: choose another run.name"
                )

    def finish(self, steps: int) -> None:
        """Records that the run did all its steps and wrote all its results."""
        _write_facts(self.path, read_facts(self.path) | {"finished_steps": steps})


def open_everywhere(run: RunDirectory, steps: int, newest: Path | None, recipe: Recipe, saved: int) -> None:
    """Makes the directory of a run that begins, on rank 0. Raises RecipeError where the run cannot go on to `steps`,
    the directory cannot be written or its disk has no room for checkpoints of `saved` bytes, or a rank does not see it:
    a checkpoint's files would be on several disks. Collective."""
    run.check_goes_on(steps, newest, recipe)
    broadcast_from_main(lambda: run.open(recipe.train.save_total_limit, saved, recipe.data.chat_template_date))
    if not run.path.is_dir():
        raise RecipeError(
            f"run directory {run.path}: not seen by every rank; set run.dir to a disk that all nodes share"
        )
    leave_hangs_in(run.path / "hang")  # not before: on a GPU it makes the folder at once


def name_run(run: Run, recipe_path: Path) -> str:
    """Returns run.name, else a name for a run that begins now: the name of the recipe's file and the time."""
    stem = recipe_path.stem
    if recipe_path.name == "resolved.toml":  # an earlier run's: takes that run's name without its time
        stem = re.sub(r"-\d{8}-\d{6}$", "", recipe_path.resolve().parent.name)
    return run.name or f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"


def newest_step(run: Run, name: str) -> int:
    """Returns the step that the run `name` would go on from."""
    newest = newest_checkpoint(Path(run.dir).expanduser() / name / "checkpoints")
    return step_of(newest) if newest else 0


def find_run(recipe: Recipe, recipe_path: Path) -> tuple[RunDirectory, Path | None]:
    """Returns the directory of a run, which is locked until this process ends if it is there, and its newest
    checkpoint. One rank calls it. Raises RecipeError where another process holds it."""
    name = name_run(recipe.run, recipe_path)
    path = Path(recipe.run.dir).expanduser() / name
    token = secrets.token_hex(8)
    if is_there := path.is_dir():
        _hold(path, token)
    facts, newest = read_facts(path), newest_checkpoint(path / "checkpoints")
    day = first_day(facts, newest or recipe.train.resume_from_checkpoint)
    return RunDirectory(name, path, facts.get("finished_steps", 0), is_there, token, day), newest


def check_run_directory(run: Run) -> None:
    """Raises RecipeError where the run's directory cannot be made. Makes nothing."""
    folder = Path(run.dir).expanduser() / run.name
    parent = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    if not parent.is_dir():
        raise _unwritable(folder, f"{parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _unwritable(folder, f"{parent} is not yours to write in")


def _unwritable(folder: Path, why: str) -> RecipeError:
    return RecipeError(f"run directory {folder}: cannot be written ({why}); set run.dir to a place that can")


def _hold(path: Path, token: str) -> None:
    """Locks the run for this process: two launches into one would remove each other's checkpoints."""
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)  # not closed: the lock ends with this process
    except OSError as error:
        raise _unwritable(path, error.strerror or first_line(error)) from None
    os.register_at_fork(after_in_child=lambda: os.close(lock))  # a child that outlives it must not hold the run
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecipeError(
            f"run directory {path}: in use by {(_read_lock(path) or ['another process'])[0]}; "
            "wait until that has ended, or choose another run.name"
        ) from None
    except OSError as error:
        print_line(f"run directory {path}: not locked ({error.strerror}); do not start the same run twice")
    os.ftruncate(lock, 0)
    os.write(lock, f"pid {os.getpid()} on {socket.gethostname()}\n{token}".encode())


def _read_lock(path: Path) -> list[str]:
    """Returns who holds a run, and that launch's token."""
    try:
        return (path / "lock").read_text().splitlines()
    except OSError:
        return []


@cache
def environment() -> dict[str, Any]:
    """Returns the facts beyond the recipe that numbers depend on, the same on all ranks, read once in a process:
    versions of torch, packages and this code, GPU. Of Python's version a patch changes no number."""
    facts: dict[str, Any] = {"torch": torch.__version__, "python": ".".join(platform.python_version_tuple()[:2])}
    facts["shardbook"] = shardbook.__version__  # of the code that runs: it need not be installed
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # accelerate is only for trackers
            facts[package] = version(package)
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def git_revision() -> dict[str, str]:
    """Returns the last commit of the package's folder as the fact `git_revision`; nothing where git is not installed,
    refuses the folder (safe.directory), or it lies untracked in another repository."""
    if not (git := shutil.which("git")):
        return {}
    command = [git, "-C", str(Path(__file__).parents[1]), "log", "-1", "--format=%H", "--", "."]
    revision = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {"git_revision": revision} if revision else {}


def read_facts(run: Path) -> dict[str, Any]:
    """Returns run.json of a run directory; empty where there is none yet. Raises RecipeError for a damaged one."""
    file = run / "run.json"
    try:
        return dict(json.loads(file.read_text())) if file.is_file() else {}
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{file}: damaged ({first_line(error)}); choose another run.name") from None


def _minimised(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that decide a run's loss, by section.key, from its resolved recipe. Keys newer than that are
    absent, and so are the teacher's name and revision: the checkpoint has its digest."""
    sections = {f"{s}.{key}": value for s in ("preference", "distill") for key, value in kept.get(s, {}).items()}
    for name in ("distill.teacher", "distill.teacher_revision"):
        sections.pop(name, None)
    return {"method": kept["method"], **sections} if "method" in kept else sections


def first_day(facts: dict[str, Any], checkpoint: Path | str) -> str:
    """Returns the day that the chat template reads: that in the `facts` of a run, else that of the run of `checkpoint`,
    which it begins with; that of today for a run that begins."""
    if day := facts.get(DAY):
        return str(day)
    path = Path(checkpoint).expanduser()
    for way in (path.absolute(), path.resolve()) if checkpoint else ():  # either may be behind a link
        if day := _read_resolved(Path(*way.parts[:-2]) / "resolved.toml").get("data", {}).get(DAY):
            return str(day)
    return f"{date.today()}"


def _read_resolved(file: Path) -> dict[str, Any]:
    """Returns a resolved recipe; empty where there is none yet. Raises RecipeError for a damaged one."""
    try:
        return tomllib.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise RecipeError(f"{file}: damaged ({first_line(error)}); choose another run.name") from None


def _write_facts(run: Path, facts: dict[str, Any]) -> None:
    write_whole(run / "run.json", json.dumps(facts, indent=2) + "\n")
