"""Several stages side by side: the same recipe and data under each, one after another, and the report of them all.

Invariant: a variant is an ordinary run in the comparison's directory, started by the ordinary command in processes of
its own; nothing here touches how it trains. A variant that fails is reported and the rest go on.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from shardbook.parallel.mesh import resolve_sizes
from shardbook.ranks.exits import DONE, FAILED, LAUNCHER, PREEMPTED, WRONG
from shardbook.ranks.launch import passing_signals
from shardbook.ranks.machine import count_gpus
from shardbook.recipe import Parallel, Recipe, RecipeError, Run, flatten_recipe, load_recipe, nearest, resolve_precision
from shardbook.recipe.stages import OF_ANY, STAGES, SWITCHES, find_stage
from shardbook.terminal import build_console

# Keys of [parallel] that only some stages have: a variant of another stage than the recipe's starts without them.
OF_A_STAGE = [key for key in Parallel.model_fields if key not in ("stage", *OF_ANY)]
LISTED = "variants.json"  # the runs of a comparison in order, directory -> name


@dataclass(frozen=True)
class Variant:
    """One run of the comparison. `words`: the overrides that it adds to the common command line."""

    name: str
    words: tuple[str, ...]

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.=-]+", "_", self.name).replace("=", "-")


def read_variants(stages: str, recipe_path: Path, overrides: list[str], nproc: int) -> list[Variant]:
    """Returns the variants in `stages`, such as `zero3 hsdp,parallel.dp_replicate_size=4`: separated by spaces, each a
    stage (or nothing, for the recipe's) and overrides. Raises RecipeError for all that would be refused."""
    variants, wrong = [], []
    for text in stages.split():
        try:
            variants.append(_read_variant(text, recipe_path, overrides, nproc))
        except RecipeError as error:
            wrong.append(f"variant {text}: {str(error).removeprefix(f'{recipe_path}: ')}")
    if wrong:
        raise RecipeError("; ".join(wrong))
    if not variants:
        raise RecipeError(f"STAGES is empty: name some of {', '.join(STAGES)}, apart by spaces")
    folders = [variant.folder for variant in variants]
    if twice := {variant.name for variant in variants if folders.count(variant.folder) > 1}:
        raise RecipeError(f"STAGES names {', '.join(sorted(twice))} more than once")
    return variants


def _read_variant(text: str, recipe_path: Path, overrides: list[str], nproc: int) -> Variant:
    # a list has commas too: only a comma before `key=` separates overrides
    first, *given = re.split(r",(?=[\w.]+=)", text)
    words = [first, *given]
    if "=" not in first:
        before, wanted = load_recipe(recipe_path, overrides).parallel, find_stage(first)
        added = _apart(before, wanted.name, nproc) if find_stage(before.stage) is not wanted else ()
        keys = {word.partition("=")[0] for word in given}
        words = [f"parallel.stage={first}", *(word for word in added if word.partition("=")[0] not in keys), *given]
    recipe = load_recipe(recipe_path, [*overrides, *words])
    resolve_sizes(recipe.parallel, find_stage(recipe.parallel.stage).axes, nproc)
    if taken := [word for word in words if word.startswith(("run.name=", "run.dir=", "run.group="))]:
        raise RecipeError(f"{taken[0]}: a comparison sets that itself; leave it out")
    if not 0 < recipe.train.logging_steps <= (recipe.train.steps or recipe.train.logging_steps):
        reason = f"train.logging_steps = {recipe.train.logging_steps} logs none of {recipe.train.steps} steps"
        raise RecipeError(f"{reason}; a comparison is of logged steps")
    return Variant(text, tuple(words))


def _apart(before: Parallel, stage: str, nproc: int) -> Iterator[str]:
    """Yields overrides for a variant of another `stage`: values that it needs, and defaults of other stages' keys."""
    halves = {"secondary_shard": nproc // 2} if nproc > 3 else {}  # one machine as if it were two nodes
    needs: dict[str, dict[str, Any]] = {"hsdp": {"dp_replicate_size": 2}, "zeropp": SWITCHES | halves}
    for key in OF_A_STAGE:
        default = Parallel.model_fields[key].default
        if (value := needs.get(stage, {}).get(key, default)) != getattr(before, key):
            yield f"parallel.{key}={json.dumps(value)}"


def compare(
    recipe_path: Path, stages: str, overrides: list[str], nproc: int, run: Run, beside: str, publishes: bool
) -> int:
    """Runs every variant with `nproc` ranks on this machine in the directory that `run` names, then writes the report,
    which holds the variants against `beside` (empty: the first that finished).

    Returns DONE, FAILED where a variant failed, WRONG where each was refused, or PREEMPTED where it was stopped: the
    same command then continues, and runs no finished variant again. Raises RecipeError.
    """
    variants = read_variants(stages, recipe_path, overrides, nproc)
    _check_named(beside, [variant.name for variant in variants])
    name = run.name or f"{recipe_path.stem}-compare-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(run.dir).expanduser() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"{folder}: cannot be written ({error.strerror}); set run.dir to a place that can") from None
    for variant in variants:
        _check_same(folder / variant.folder, load_recipe(recipe_path, [*overrides, *variant.words]), nproc)
    print(f"compare  {folder}: {len(variants)} variants of {recipe_path.stem}, {nproc} ranks each")
    listed = {variant.folder: variant.name for variant in variants}
    (folder / LISTED).write_text(json.dumps(listed, indent=1) + "\n")
    codes, processes = {}, list[subprocess.Popen[Any]]()
    with passing_signals(processes) as (asked, told):
        for number, variant in enumerate(variants, 1):
            title = f"[{number}/{len(variants)}] {variant.name}"
            print(f"{title}: {' '.join(variant.words)}", flush=True)
            placed = (f"run.dir={folder}", f"run.name={variant.folder}", f"run.group={name}")
            command = [*("train", str(recipe_path)), *overrides, *variant.words, *placed, "--nproc", str(nproc)]
            codes[variant] = run_variant(command, folder / f"{variant.folder}.log", title, processes, asked, told)
            if codes[variant] == PREEMPTED or asked:
                print(f"stopped  in {variant.name}; continue with run.name={name}")
                return PREEMPTED
            if codes[variant] != DONE:
                print(f"{title}: failed, exit code {codes[variant]}; its output is in {folder / variant.folder}.log")
    if DONE not in codes.values():
        print(f"shardbook: none of {len(variants)} variants finished", file=sys.stderr)
        return WRONG if {*codes.values()} == {WRONG} else FAILED
    report(folder, beside, publishes)
    return FAILED if any(codes.values()) else DONE


def _check_named(beside: str, names: list[str]) -> None:
    if beside and beside not in names:
        raise RecipeError(f"--beside {beside}: no such variant{nearest(beside, names)}; there are {', '.join(names)}")


def _check_same(run: Path, recipe: Recipe, nproc: int) -> None:
    """Raises RecipeError where the run exists with other settings: the report would show it under wrong ones."""
    if not (run / "resolved.toml").is_file():
        return
    from shardbook.run.directory import read_facts

    before = load_recipe(run / "resolved.toml")
    device_type = "cuda" if count_gpus() else "cpu"
    was, now = (flatten_recipe(resolve_precision(one, device_type)) for one in (before, recipe))
    was["ranks"], now["ranks"] = read_facts(run).get("world_size"), nproc
    if differ := [key for key, value in now.items() if value != was[key] and not key.startswith("run.")]:
        changes = "; ".join(f"{key} was {was[key]!r} there, is {now[key]!r} here" for key in differ[:3])
        raise RecipeError(f"{run} was run with other settings: {changes}; choose another run.name")


def run_variant(
    words: list[str],
    log: Path,
    title: str,
    processes: list[subprocess.Popen[Any]],
    asked: list[int],
    told: set[subprocess.Popen[Any]],
) -> int:
    """Runs `shardbook` with `words` as the one of `processes`, to which signals are passed on, the last one `asked`
    before too; keeps its output in `log` and prints its steps. `told`: the processes that got a signal. Returns the
    exit code."""
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardbook.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # else a Ctrl-C reaches it twice, from the terminal and from us
            env=os.environ | {LAUNCHER: str(os.getpid())},  # it ends when this process is gone
        )
        processes[:] = [process]
        if asked and process not in told:  # a signal came while it was being started
            process.send_signal(asked[-1])
        for line in process.stdout or ():
            file.write(line)
            file.flush()
            if line.startswith(("step ", "shardbook: ", "done ", "traffic ")):
                print(f"{title}  {line.rstrip()}", flush=True)
    return process.wait()


def report(folder: Path, beside: str = "", publishes: bool = False) -> None:
    """Writes report.json, report.html and wandb-workspace.json of the runs in `folder`, and prints a table. The run
    named `beside`, else the first that finished, is the baseline of the others. Raises RecipeError where none did."""
    from shardbook.compare.compare_page import summary_rows, write_page
    from shardbook.compare.outcome import read_outcome, write_json
    from shardbook.compare.workspace import keep_workspace, publish

    folder = folder.resolve()  # its name is the title, also where it is given as "."
    try:
        listed = dict(json.loads((folder / LISTED).read_text()))
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{folder / LISTED}: damaged ({error}); run the comparison again") from None
    except FileNotFoundError:  # runs that were copied there by hand, perhaps from a cluster
        listed = {path.parent.name: path.parent.name for path in sorted(folder.glob("*/resolved.toml"))}
    outcomes = [read_outcome(folder / name, shown) for name, shown in listed.items()]
    _check_named(beside, [outcome.name for outcome in outcomes])
    # the baseline, then finished ones, else as given
    outcomes.sort(key=lambda outcome: (not outcome.finished, outcome.name != beside))
    if not outcomes or not outcomes[0].finished:
        why = "".join(f"; {outcome.name}: {outcome.note}" for outcome in outcomes)
        raise RecipeError(f"{folder}: none of its {len(outcomes)} variants can be reported{why}")
    if beside and outcomes[0].name != beside:
        note = next(outcome.note for outcome in outcomes if outcome.name == beside)
        raise RecipeError(f"--beside {beside}: {note}; name a variant that finished")
    write_json(folder / "report.json", folder.name, outcomes)
    write_page(folder / "report.html", folder.name, outcomes)
    keep_workspace(folder / "wandb-workspace.json", folder.name, outcomes)
    rows = summary_rows(outcomes)
    head = ["variant", *rows[0][1]]
    table = Table(*(Column(name, overflow="fold") for name in head), title=folder.name, title_justify="left")
    for name, row in rows:
        table.add_row(name, *row.values())
    build_console().print(table, markup=False)
    print(f"report   {folder / 'report.html'}")
    if publishes:
        publish(folder, outcomes)
