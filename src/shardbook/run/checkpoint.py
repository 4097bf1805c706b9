"""Checkpoints: model, optimizer, loader position, and each rank's random state.

torch's distributed checkpoint (DCP) plans who writes and reads what, item_storage.py moves the bytes, stored_items.py
says what a whole checkpoint is. Tensors are stored with their global shapes, so a load reshards them for another world
size or stage. The learning rate needs no state: it is a function of the step.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from shardbook.model.adapters import base_identity, kept_parameters
from shardbook.model.flash import current_flash
from shardbook.model.teacher import teacher_identity
from shardbook.optim import state_kind
from shardbook.parallel.sharding import ShardedModel
from shardbook.parallel.units import GLOBAL_SHAPES, TP_SHARDED
from shardbook.ranks.distributed import broadcast_from_main
from shardbook.ranks.exits import RunFailed
from shardbook.ranks.lost import is_lost_peer
from shardbook.ranks.progress import long_phase
from shardbook.recipe import RecipeError, first_line
from shardbook.run import operations
from shardbook.run.background import Background, StagingWriter
from shardbook.run.item_storage import ItemReader, ItemWriter
from shardbook.run.save_plan import Planned, PlanOnce
from shardbook.run.stored_items import Damaged, Facts, StoredCheckpoint, begin, damaged, name_of, publish, read_stored

OPTIMIZER = "optimizer"  # kind of the optimizer state
BASE = "base"  # digest of the adapters' base model; absent or empty where the checkpoint has every parameter
TEACHER = "teacher"  # digest of the teacher; absent without one
FLASH = "flash_attention"  # the implementation that was active
RESIDUAL = "residual"  # exchanges whose rounding errors a checkpoint of before holds
# one flat key a tensor and moment: names, not parameter numbers, so another grouping or layout still matches
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
HYPERPARAMETERS = "param_groups."  # prefix of their keys in the optimizer's flat state
ELSEWHERE = (
    *(MemoryError, torch.OutOfMemoryError, torch.AcceleratorError, torch.cuda.CudaError),
    *(RecipeError, RunFailed, KeyboardInterrupt, SystemExit),
)
NO_MEMORY = "DefaultCPUAllocator"  # in the message of the RuntimeError that torch raises where host memory runs out
# by the optimizer whose state was saved: a plan ends with its run, also where a process has several runs
_plans: WeakKeyDictionary[torch.optim.Optimizer, Planned] = WeakKeyDictionary()


@dataclass(frozen=True)
class TrainState:
    """The state of a run that is not a tensor."""

    step: int  # optimizer steps done
    tokens: int  # trained tokens seen, all ranks
    loader: dict[str, Any]
    log: dict[str, int] = field(default_factory=dict)  # what the step log must find again: see its `mark`


@long_phase("a checkpoint")
def save_checkpoint(
    folder: Path,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    keep: int,
    check_held: Callable[[], None] = lambda: None,
    background: Background | None = None,
) -> Path:
    """Publishes `folder`/step-000200, removes all but the `keep` newest (0: keeps all), and returns its path. Raises
    RunFailed where it cannot be written, has a number that is not finite, or `check_held` says that another launch has
    the run: nothing is published then. With `background` it only plans; that copies and publishes. Collective."""
    path = folder / name_of(state.step)
    tensors = _tensors(sharded.masters, optimizer) | {_own_key(): _rng_state()}
    planner = PlanOnce(tensors, _plans.pop(optimizer, None))

    later: Callable[[dict[str, Facts]], None] | None = None

    def finish(side: Path, written: dict[str, Facts]) -> None:
        nonlocal later
        facts = _facts(sharded, optimizer, state)
        later = partial(publish, side, state.step, facts, keep=keep, check_held=check_held)
        if not background:
            later(written)

    given = (path, dist.get_rank(), lambda: begin(folder, state.step, planner.total_bytes), finish)
    writer = StagingWriter(*given) if background else ItemWriter(*given)
    try:
        with _writable(path):
            state_dict_saver.save(tensors, storage_writer=writer, planner=planner)
    except BaseException:
        if writer.side and dist.get_rank() == 0:  # else a full disk would stay full
            operations.remove_tree(writer.side)
        raise
    _plans[optimizer] = planner.planned()
    if isinstance(writer, StagingWriter) and background:
        background.begin(state.step, writer, later)
        if sharded.offloaded:  # backward changes them, else only the optimizer's step does
            background.wait_copied()
    return path


def _facts(sharded: ShardedModel, optimizer: torch.optim.Optimizer, state: TrainState) -> dict[str, Any]:
    """Returns all of a checkpoint that is no tensor."""
    facts = {
        "step": state.step,
        "tokens": state.tokens,
        "loader": state.loader,
        "log": state.log,
        "ranks": _ranks(sharded),
        OPTIMIZER: state_kind(optimizer, sharded.layout.shards),
        FLASH: current_flash(),
    }
    frozen = {BASE: base_identity(sharded.model), TEACHER: teacher_identity(sharded.model)}
    return facts | {name: digest for name, digest in frozen.items() if digest} | {"shapes": whole_shapes(sharded.model)}


def _read(path: Path) -> StoredCheckpoint:
    with _readable(path):
        return read_stored(path)


def check_checkpoint(path: Path, sharded: ShardedModel) -> tuple[StoredCheckpoint, TrainState]:
    """Returns a checkpoint but for its tensors, and its TrainState. Raises Damaged, or RecipeError where it is
    incomplete or of another model. Collective."""
    stored = broadcast_from_main(lambda: _read(path))  # by one rank: each file has a line for each tensor
    with _readable(path):
        state = stored.state
        here, there = whole_shapes(sharded.masters), state["shapes"]
        stands = TrainState(state["step"], state["tokens"], state["loader"], state["log"])
    if differ := [
        f"{name}: {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
        for name in here | there
        if here.get(name) != there.get(name)
    ]:
        raise RecipeError(
            f"checkpoint {path} is of another model ({len(differ)} parameters differ; {'; '.join(differ[:3])}); "
            "set model.path, method and [lora] to those of its run"
        )
    for key, ours, said, way_out in (
        (BASE, base_identity(sharded.model), "holds adapters of another base model", "[model]"),
        (TEACHER, teacher_identity(sharded.model), "learned from another teacher", "method and [distill]"),
    ):
        if ours != (theirs := state.get(key, "")):
            raise RecipeError(
                f"checkpoint {path}: {said} ({theirs or 'none'} there, {ours or 'none'} here); set {way_out} to what "
                "the run began with"
            )
    return stored, stands


def other_bits(stored: StoredCheckpoint) -> str:
    """Returns, for people, why a run that goes on from a checkpoint has other bits than one that never stopped; empty
    where attention runs by the same implementation."""
    now, before = current_flash(), stored.state[FLASH]
    return f"flash attention ran by {before} there, runs by {now} here, so bits differ" if now != before else ""


def load_checkpoint(
    path: Path, sharded: ShardedModel, optimizer: torch.optim.Optimizer, is_clean: bool = True
) -> tuple[TrainState, str]:
    """Loads the model from a whole checkpoint, the optimizer where its stored state is of the same kind, and, where
    the ranks are the same, this rank's random state.

    Returns the run's state, and a list for people of the parts that were not loaded, empty where all were. Raises
    RecipeError as check_checkpoint does, and, unless `is_clean`, where state that a load of a damaged checkpoint has
    changed would not be loaded. Collective.
    """
    model = sharded.masters
    stored, stands = check_checkpoint(path, sharded)
    state = stored.state
    kind, there_kind = state_kind(optimizer, sharded.layout.shards), state[OPTIMIZER]
    same_kind = kind == there_kind
    read = _tensors(model, optimizer) if same_kind else {"model": _parameters(model)}
    same_world = state["ranks"] == _ranks(sharded)
    if same_world:
        read[_own_key()] = _rng_state()
    lost = [] if same_kind else [f"optimizer state: of {there_kind}, here {kind}"]
    if lost and not is_clean:
        said = f"checkpoint {path} cannot follow the load of a damaged one ({lost[0]})"
        raise RecipeError(f"{said}; remove the damaged one, and start again")
    with _readable(path):
        state_dict_loader.load(read, storage_reader=ItemReader(path, stored.items))
    if same_world:
        torch.set_rng_state(read[_own_key()]["cpu"])
        if "cuda" in read[_own_key()]:
            torch.cuda.set_rng_state(read[_own_key()]["cuda"])
    lost += ["residuals of error feedback: none are kept now"] * bool(state.get(RESIDUAL))
    return stands, "; ".join([*["random state: other ranks"] * (not same_world), *lost])


def checkpoint_shapes(path: Path) -> dict[str, torch.Size]:
    """Returns every parameter's full shape in a checkpoint, in order. Raises RecipeError where it is not whole."""
    with _readable(path):
        return {name: torch.Size(shape) for name, shape in _read(path).state["shapes"].items()}


def read_parameters(path: Path, shapes: dict[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """Yields `(name, full tensor in fp32)` of the model parameters in a checkpoint, one at a time and without a process
    group, so that one host can export a 70B."""
    reader = ItemReader(path, _read(path).items)
    for name, shape in shapes.items():
        box = {f"model.{name}": torch.empty(shape)}
        with _readable(path), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what is asked for
            state_dict_loader.load(box, storage_reader=reader, no_dist=True)
        yield name, box[f"model.{name}"]


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        _pass_on(error)
        raise RunFailed(f"checkpoint {path}: cannot be written ({_cause(error)})") from error


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises Damaged for an error inside: the checkpoint was damaged after it was complete."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
        _pass_on(error)
        raise damaged(path, "", _cause(error)) from error


def _met(error: BaseException) -> list[BaseException]:
    """Returns the errors of all ranks that DCP reports, or the error itself."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return [met for met, _ in failures] or [error]


def _pass_on(error: BaseException) -> None:
    """Raises an error that is no fault of the files, of whichever rank: else people would remove a good checkpoint."""
    for met in sorted(_met(error), key=lambda each: isinstance(each, Damaged)):  # of several, a sound file's first
        if isinstance(met, ELSEWHERE) or is_lost_peer(met) or NO_MEMORY in str(met):
            raise met


def _cause(error: BaseException) -> str:
    """Returns the words of the first rank's error."""
    first = _met(error)[0]
    return f"{type(first).__name__}: {first_line(first)}"


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the tensors that a checkpoint holds, without the optimizer's hyperparameters: the recipe has them, and
    flat they are eleven pickles a parameter and rank, three quarters of the entries of rank 0's plan."""
    # The optimizer's own tensors: DCP loads into them, so no learning rate or decay is loaded from a checkpoint.
    # torch's set_optimizer_state_dict would cast each to the dtype of its parameter.
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    state = {name: value for name, value in flat.items() if not name.startswith(HYPERPARAMETERS)}
    return {"model": _parameters(model), "optimizer": state}


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    # Parameters, not the module's state dict: that lists a tied weight twice. DCP loads into these same tensors.
    return {name: parameter.detach() for name, parameter in kept_parameters(model).items()}


def whole_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Returns the full shape of each parameter that a checkpoint of the model holds; also before a stage is applied."""
    own = {name: getattr(kept, TP_SHARDED, (0, kept.shape))[1] for name, kept in kept_parameters(model).items()}
    whole = getattr(model, GLOBAL_SHAPES, None) or own  # with layers on other ranks
    return {name: list(shape) for name, shape in whole.items()}


def _ranks(sharded: ShardedModel) -> list[Any]:
    """Returns the world size and the kind of device, to which a rank's random state belongs."""
    return [sharded.layout.world_size, next(sharded.model.parameters()).device.type]


def _own_key() -> str:
    return f"own.{dist.get_rank()}"


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
