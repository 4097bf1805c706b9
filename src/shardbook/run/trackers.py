"""Trackers of a run's metrics, besides its own file. wandb is started here, any other through accelerate.

Invariant: a tracker may fail, the run may not: an error is printed once and ends that tracker only. wandb is offline
where there is no key: a run never waits for a network, and `wandb sync` sends it later.
"""

import importlib.util
import netrc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardbook.recipe import RecipeError, Run
from shardbook.run.wandb_file import steps_in
from shardbook.terminal import print_line

STEP = "train/global_step"  # the axis of every chart; TOKENS is the second
TOKENS = "train/tokens"
Log = Callable[[int, dict[str, Any]], None]  # step, metrics
LogSamples = Callable[[list[dict[str, Any]]], None]
Finish = Callable[[bool], None]  # whether the run failed
Started = tuple[Log, LogSamples, Finish]


class Trackers:
    """The trackers that `run.report_to` names, each until it fails."""

    def __init__(self, folder: Path, name: str, run: Run, config: dict[str, Any]):
        """Starts them. `folder`: the run directory, into which they write. `config`: flat, see flat_config."""
        self._started: dict[str, Started] = {}
        for tracker in names(run):
            start = _start_wandb if tracker == "wandb" else partial(_start_through_accelerate, tracker)
            with self._guard(tracker):
                self._started[tracker] = start(folder, name, run, config)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        for tracker, (log, *_) in list(self._started.items()):
            with self._guard(tracker):
                log(step, metrics)

    def log_again(self, rows: list[dict[str, Any]]) -> None:
        """Logs those of an earlier launch's rows, each with its `step`, that wandb's files lack: a killed process had
        not written them. Other trackers write a row when it is logged."""
        for row in rows if "wandb" in self._started else ():
            with self._guard("wandb"):
                self._started["wandb"][0](row["step"], {name: row[name] for name in row if name != "step"})

    def log_samples(self, samples: list[dict[str, Any]]) -> None:
        """Adds rows of one step to a table that grows; only wandb has one."""
        for tracker, (_, log_samples, _) in list(self._started.items()):
            with self._guard(tracker):
                log_samples(samples)

    def finish(self, failed: bool) -> None:
        for tracker, (*_, finish) in list(self._started.items()):
            with self._guard(tracker):
                finish(failed)

    @contextmanager
    def _guard(self, tracker: str) -> Iterator[None]:
        """Prints an error of the body and drops the tracker: a dashboard must never end a training run."""
        try:
            yield
        except Exception as error:
            print_line(f"{tracker}: {error}; the run goes on without it")
            self._started.pop(tracker, None)


def names(run: Run) -> list[str]:
    """Returns the trackers of `run.report_to`."""
    named = [run.report_to] if isinstance(run.report_to, str) else run.report_to
    return [tracker for tracker in named if tracker != "none"]


def check_installed(run: Run) -> None:
    """Raises RecipeError for a tracker whose package, of the same name, is not installed."""
    for tracker in names(run):
        if importlib.util.find_spec(tracker) is None:
            raise RecipeError(f"run.report_to = {tracker!r}: its package is not installed; pip install {tracker}")


def flat_config(values: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Returns the recipe flat, as trackers want it: `stage`, `learning_rate`, `checkpointing`; the section stays in
    front where two have the same key (`optim_name`). `values`: by section.key; `sizes`: of the effective mesh axes."""
    leaves = Counter(name.rpartition(".")[2] for name in values)
    config = {}
    for name, value in values.items():
        leaf = name.rpartition(".")[2]
        config[leaf if leaves[leaf] == 1 else name.replace(".", "_")] = value
    return config | {f"{axis}_size": size for axis, size in sizes.items()}


def _start_wandb(folder: Path, name: str, run: Run, config: dict[str, Any]) -> Started:
    """Starts a wandb run, online where there is a key, else recorded in the run directory."""
    import wandb

    there = steps_in(folder, STEP)  # before this launch's own file is made
    settings = wandb.Settings(silent=True, init_timeout=30)
    if "WANDB_MODE" not in os.environ and not has_wandb_key():
        settings.mode = "offline"
    started = wandb.init(
        project=run.project,
        name=name,
        id=f"{run.group}-{name}" if run.group else name,
        group=run.group or None,
        job_type=config["stage"],
        resume="allow",
        dir=str(folder),
        config=config,
        settings=settings,
    )
    started.define_metric(STEP)
    started.define_metric(TOKENS, step_metric=STEP)
    started.define_metric("*", step_metric=STEP)
    tables: list[wandb.Table] = []

    def log_samples(samples: list[dict[str, Any]]) -> None:
        if not tables:  # INCREMENTAL: in other modes a table logged again is overwritten, or stored twice
            tables.append(wandb.Table(columns=list(samples[0]), log_mode="INCREMENTAL"))
        for sample in samples:
            tables[0].add_data(*sample.values())
        started.log({STEP: samples[0]["step"], "samples": tables[0]})

    return (
        lambda step, metrics: None if step in there else started.log({STEP: step} | metrics),
        log_samples,
        lambda failed: started.finish(int(failed)),
    )


def has_wandb_key() -> bool:
    """Returns whether wandb finds a key without asking: in its variable, or in the file of `wandb login`."""
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators(urlsplit(wandb.Settings().base_url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _start_through_accelerate(tracker: str, folder: Path, name: str, run: Run, config: dict[str, Any]) -> Started:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # else the loggers of trackers that run on every process, trackio's and swanlab's, raise
    kind = LOGGER_TYPE_TO_CLASS[tracker]
    # they group runs by a project; a tracker that writes files gets its own folder in the run's
    own = folder / tracker
    match tracker:
        case "tensorboard":
            started = kind(name, own)
        case "trackio":
            started = kind(run.project, name=name, group=run.group or None, resume="allow")
        case "swanlab":
            has_key = "SWANLAB_API_KEY" in os.environ or (Path.home() / ".swanlab" / ".netrc").is_file()
            mode = {} if has_key or "SWANLAB_MODE" in os.environ else {"mode": "offline"}
            started = kind(run.project, name=name, group=run.group or None, log_dir=str(own), **mode)
        case "mlflow":
            started = kind(run.project, run_name=name)
        case _:
            started = kind(run.project, own) if kind.requires_logging_directory else kind(run.project)
    started.start()
    if tracker == "aim":
        started.tracker.name = name
    plain = {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in config.items()}
    started.store_init_configuration(plain | {"run": name, "group": run.group})
    return (
        lambda step, metrics: started.log(metrics, step=step),
        lambda samples: None,
        lambda failed: started.finish(),
    )
