"""Trackers of a run's metrics, besides its own file: accelerate's, by accelerate's own interface.

Invariant: a tracker may fail, the run may not: an error is printed once and ends that tracker only. One that would ask
for a key, or wait for a network, is offline where there is none: `wandb sync`, `swanlab sync` send it later.
"""

import importlib.util
import netrc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardbook.recipe import RecipeError, Run
from shardbook.terminal import print_line

STEP = "train/global_step"  # the axis of every chart of a comparison; train/tokens is the second


def options_of(tracker: str, folder: Path, name: str, run: Run, stage: str) -> dict[str, Any]:
    """Returns what accelerate's class of a tracker is made with: the run's `name` in the project `run.project`, files
    in the run directory `folder`."""
    files, group = str(folder / tracker), run.group or None
    options: dict[str, dict[str, Any]] = {
        "wandb": {
            "run_name": run.project,  # of accelerate's: the project, wherever `name` is another word
            "name": name,
            "id": f"{run.group}-{name}" if run.group else name,
            "group": group,
            "job_type": stage,
            "resume": "allow",
            "dir": str(folder),
            "settings": {"silent": True, "init_timeout": 30},
        },
        "tensorboard": {"run_name": name, "logging_dir": files},
        "trackio": {"run_name": run.project, "name": name, "group": group, "resume": "allow"},
        "mlflow": {"experiment_name": run.project, "run_name": name},
        "swanlab": {"run_name": run.project, "name": name, "group": group, "log_dir": files},
        "aim": {"run_name": name, "logging_dir": files},
    }
    return options[tracker]


class Trackers:
    """The trackers that `run.report_to` names, each until it fails."""

    def __init__(self, folder: Path, name: str, run: Run, config: dict[str, Any]):
        """Starts them. `folder`: the run directory, into which they write. `config`: flat, see flat_config."""
        self._started: dict[str, Any] = {}
        for tracker in names(run):
            with self._guard(tracker):
                self._started[tracker] = _start(tracker, folder, name, run, config)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        for tracker, started in list(self._started.items()):
            with self._guard(tracker):
                started.log({STEP: step} | metrics, step=step)

    def log_samples(self, samples: list[dict[str, Any]]) -> None:
        """Logs the samples of one step as a table, where a tracker has tables."""
        columns, rows = list(samples[0]), [list(sample.values()) for sample in samples]
        for tracker, started in list(self._started.items()):
            if hasattr(started, "log_table"):
                with self._guard(tracker):
                    started.log_table("samples", columns=columns, data=rows, step=samples[0]["step"])

    def finish(self) -> None:
        for tracker, started in list(self._started.items()):
            with self._guard(tracker):
                started.finish()

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


def has_wandb_key() -> bool:
    """Returns whether wandb finds a key without asking: in its variable, or in the file of `wandb login`."""
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators(urlsplit(wandb.Settings().base_url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def has_swanlab_key() -> bool:
    """Returns whether SwanLab finds a key without asking: in its variable, or in the file of `swanlab login`."""
    return bool(os.environ.get("SWANLAB_API_KEY")) or (Path.home() / ".swanlab" / ".netrc").is_file()


# the variable that takes a tracker off the network, where the user has not set it and there is no key
OFFLINE: dict[str, tuple[str, Callable[[], bool]]] = {
    "wandb": ("WANDB_MODE", has_wandb_key),
    "swanlab": ("SWANLAB_MODE", has_swanlab_key),
}


def _start(tracker: str, folder: Path, name: str, run: Run, config: dict[str, Any]) -> Any:
    """Returns accelerate's own object of a `tracker`, started."""
    import torch
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    # else PartialState would set another number of threads on a CPU than this rank's share of cores (distributed.py)
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    PartialState()  # else the loggers of trackers that run on every process, trackio's and swanlab's, raise
    if tracker in OFFLINE:
        variable, has_key = OFFLINE[tracker]
        if variable not in os.environ and not has_key():
            os.environ[variable] = "offline"
    started = LOGGER_TYPE_TO_CLASS[tracker](**options_of(tracker, folder, name, run, config["stage"]))
    started.start()
    plain = {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in config.items()}
    started.store_init_configuration(plain | {"run": name, "group": run.group})
    return started
