"""Save: a run's checkpoints every `train.save_steps` steps, at its end, and where it is asked to stop.

A checkpoint has the model, the optimizer's state, the loader's position and each rank's random state; tensors have
their full shapes, so that a load reshards them for another world size or stage. The learning rate needs no state: it is
a function of the step. Invariant: a rank writes its own boxes; an error on one rank is raised on all, and then nothing
is published, as where a number is not finite.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardbook.arithmetic import is_due
from shardbook.boxes import assign_writes, local_box
from shardbook.comm.torch_private import norms_of
from shardbook.local_tensors import plain_tensors
from shardbook.memory.host_state import available_memory
from shardbook.model.adapters import kept_parameters
from shardbook.model.flash import current_flash
from shardbook.optim import state_kind
from shardbook.optim.table import OPTIMIZERS
from shardbook.parallel.layout import Layout
from shardbook.parallel.router_bias import ITEMSIZE, saved_biases
from shardbook.parallel.sharding import ShardedModel
from shardbook.plan.formulas import predict_copied
from shardbook.ranks.distributed import broadcast_from_main, gather_results, sum_over_ranks
from shardbook.ranks.exits import RunFailed
from shardbook.ranks.peer_errors import is_lost_peer
from shardbook.ranks.progress import long_phase
from shardbook.recipe import RecipeError, first_line
from shardbook.run.checkpoint import disk
from shardbook.run.checkpoint.async_save import AsyncSave, Items, StagedItems
from shardbook.run.checkpoint.format import Facts, TrainState, begin, in_gb, name_of, publish, write_items
from shardbook.run.directory import RunDirectory
from shardbook.run.log.step_log import NotFinite, StepLog
from shardbook.run.prepare import Job
from shardbook.terminal import print_line

OPTIMIZER = "optimizer"  # kind of the optimizer state
FLASH = "flash_attention"  # the implementation that was active
BIASES = "router_biases"  # the shapes of those that are state; absent where weights files have them
MODEL, MOMENTS = "model.", "optimizer.state."  # how the names of items begin; a moment is named by its parameter
NORMED = (torch.float32, torch.bfloat16, torch.float16)  # their norms are added up in fp32
NO_MEMORY = "DefaultCPUAllocator"  # in the message of the RuntimeError that torch raises where host memory runs out
NOT_OF_FILES = MemoryError, torch.OutOfMemoryError, torch.AcceleratorError, torch.cuda.CudaError, RecipeError, RunFailed
EVERY = (Exception,)  # of one rank they are raised on all: whatever work on files meets


@dataclass
class Saver(AbstractContextManager["Saver"]):
    """Writes the checkpoints of a run that began at step `saved`. All ranks make the same calls. As a context it
    publishes the checkpoint that is being written where a later step is not finite, before the run ends by that."""

    run: RunDirectory
    job: Job
    sharded: ShardedModel
    optimizer: torch.optim.Optimizer
    log: StepLog
    saved: int

    def __post_init__(self) -> None:
        self.train = self.job.recipe.train
        self.async_save = None
        if not self.train.save_steps:
            return
        copied = predict_copied(self.job.layout, self.log.ranks.rank, self.job.recipe.optim.name)
        next_due = (self.saved // self.train.save_steps + 1) * self.train.save_steps
        if next_due <= self.job.steps and self.job.recipe.saves_behind and self._has_memory(copied):
            device, waits = next(self.sharded.masters.parameters()).device, self.train.async_save == "wait"
            self.async_save = AsyncSave(copied, device, waits)
            self.optimizer.register_step_pre_hook(self.async_save.wait_copied)  # (an offloaded one is copied at once)

    def _has_memory(self, copied: int) -> bool:
        """Returns whether every node has memory for what its ranks save, `copied` bytes each, and says where one has
        not: then only what was asked for is tried. Collective."""
        needed = copied * self.log.ranks.ranks_per_node
        lacks = self.train.async_save == "auto" and available_memory() < needed
        if not sum_over_ranks(lacks)[0]:
            return True
        reason = f"no memory for a copy of what a node saves ({in_gb(needed)}): steps wait for checkpoints"
        print_line(f"warning  train.async_save = 'auto': {reason}")
        return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NotFinite) and self.async_save:  # on all ranks alike, else they would wait for each other
            try:
                self.async_save.finish()
            except RunFailed as failed:  # the run ends by the error that it ends by already
                print_line(f"warning  {failed}", any_rank=True)

    def is_due(self, step: int) -> bool:
        return is_due(step, self.train.save_steps)

    def after(self, state: TrainState) -> None:
        """Saves after a step if due; before, `log` raises where that step is not finite. Collective."""
        if self.is_due(state.step):
            with self.log.paused():
                self._save(state, self.async_save)

    def flags(self) -> list[float]:
        """Returns flags to sum over ranks beside the next step; `take_flag_sums` takes the sums."""
        return self.async_save.flags() if self.async_save else [0.0, 0.0, 0.0]

    def take_flag_sums(self, sums: list[float]) -> None:
        if self.async_save:
            self.async_save.take_flag_sums(sums)

    def finish(self, state: TrainState, stopped: bool) -> None:
        """Saves the last step, unless it is saved, where the recipe saves or the run was `stopped`. Collective."""
        if self.async_save:
            self.async_save.finish()
            self.saved = max(self.saved, self.async_save.published)
        if state.step > self.saved and (self.train.save_steps or stopped):
            self._save(state)

    def _save(self, state: TrainState, async_save: AsyncSave | None = None) -> None:
        run, keep = self.run, self.train.save_total_limit
        state = replace(state, log=self.log.mark())
        if async_save:
            async_save.finish()  # the one before: its buffer is taken again
        try:
            save_checkpoint(run.checkpoints, self.sharded, self.optimizer, state, keep, run.check_held, async_save)
        except RunFailed as error:
            if not (async_save and error.__cause__):  # without a cause of the disk's no other try helps
                raise
            async_save.report_failure(str(error), self.log.ranks.is_main)
        self.saved = self.saved if async_save else state.step


def predict_bytes(job: Job) -> int:
    """Returns the bytes of a checkpoint's parameters and optimizer state, of all ranks; Muon's matrices take
    less. 0 where a run saves nothing."""
    if not job.recipe.train.save_steps:
        return 0
    row, itemsize = OPTIMIZERS[job.recipe.optim.name], job.layout.dtype("master").itemsize
    counts = [prod(shape) for shape in kept_shapes(job.layout, job.model).values()]
    biases = sum(map(prod, job.layout.biases.values())) if job.layout.bias_update_rate else 0
    return sum(count * itemsize + row.state_bytes(count, itemsize) for count in counts) + biases * ITEMSIZE


@long_phase("a checkpoint")
def save_checkpoint(
    folder: Path,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    keep: int,
    check_held: Callable[[], None] = lambda: None,
    async_save: AsyncSave | None = None,
) -> Path:
    """Publishes `folder`/step-000200, removes all but the `keep` newest (0: keeps all), and returns its path. Raises
    RunFailed where it cannot be written, has a number that is not finite, or `check_held` says that another launch has
    the run: nothing is published then. With `async_save` that copies, writes and publishes, later. Collective."""
    path, rank, side = folder / name_of(state.step), dist.get_rank(), None
    facts = dict[str, Any]()  # on rank 0

    def make_side() -> Path:
        facts.update(state_facts(sharded, optimizer, state))
        return begin(folder, state.step, total_bytes)

    try:
        with _writable(path):
            items, total_bytes = items_to_write(sharded, optimizer)
            side = broadcast_from_main(make_side, EVERY)
            write = partial(write_finite, path, side, rank)
            publish_files = partial(publish, side, state.step, facts, keep=keep, check_held=check_held)
            if not async_save:
                everyone = gather_results(partial(write, items), EVERY)
                files = {name: size_and_hash for each in everyone for name, size_and_hash in each.items()}
                broadcast_from_main(partial(publish_files, files), EVERY)
    except BaseException:
        if side and rank == 0:  # else a full disk would stay full
            disk.remove_tree(side)
        raise
    if async_save:
        async_save.begin(state.step, StagedItems(items, write), side, publish_files if rank == 0 else None)
        if sharded.offloaded:  # backward changes them, else only the optimizer's step does
            async_save.wait_copied()
    return path


def items_to_write(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> tuple[Items, int]:
    """Returns the items that this rank writes, and the bytes that all ranks write. Raises RunFailed where these are
    not one copy of each part: a tensor that one rank lacks would else be in no file. Collective."""
    items = Items()

    def take() -> tuple[int, int, int]:
        tensors, states = checkpoint_tensors(sharded.masters, optimizer, saved_biases(sharded)), random_states()
        held = [(name, tensor, nbytes_of(tensor)) for name, tensor in tensors.items()]
        names, needed_bytes = assign_writes(held, sharded.layout.meshes, dist.get_rank(), _tied_names(sharded, tensors))
        written = {name: tensor for name, tensor in tensors.items() if name in names}
        items.extend(to_item(name, tensor) for name, tensor in (written | states).items())  # the states are each rank's
        return sum(map(nbytes_of, written.values())), sum(map(nbytes_of, states.values())), needed_bytes

    tensor_bytes, random_bytes, needed_bytes = map(sum, zip(*gather_results(take, EVERY), strict=True))
    if tensor_bytes != needed_bytes:
        raise RunFailed(f"ranks would write {tensor_bytes:,} bytes of {needed_bytes:,}: they have unlike tensors")
    return items, tensor_bytes + random_bytes


def _tied_names(sharded: ShardedModel, tensors: dict[str, Tensor]) -> set[str]:
    """Returns which of `tensors` are of parameters that another part of the model has too."""
    tied = sharded.tied_names
    return {each for name in tied for each in tensors if each == MODEL + name or each.startswith(f"{MOMENTS}{name}.")}


def nbytes_of(tensor: Tensor) -> int:
    return sum(part.nbytes for part in plain_tensors(tensor))


def to_item(name: str, tensor: Tensor) -> tuple[list[Any], list[Tensor]]:
    box, dtype = local_box(tensor, name), str(tensor.dtype).removeprefix("torch.")  # of eight bits: the parameter's
    return [name, *map(list, (box.offsets, box.sizes, box.shape)), dtype], plain_tensors(tensor.detach())


def write_finite(path: Path, side: Path, rank: int, items: Items) -> dict[str, Facts]:
    """Writes this rank's items of the checkpoint `path` into `side`, and returns the facts of its files. Raises
    RunFailed where a number is not finite, so that no rank's is published."""
    check_finite(path, rank, items)
    return write_items(side, rank, ((head, [*map(bytes_of, parts)]) for head, parts in items))


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns a tensor's bytes, on the host: of one that lies on it contiguously its own memory."""
    array: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def check_finite(path: Path, rank: int, items: Items) -> None:
    """Raises RunFailed where a number of this rank's is not finite."""
    tensors = [(head[0], part) for head, parts in items for part in parts]
    floats = [(name, part) for name, part in tensors if part.is_floating_point() and part.numel()]
    for name in _not_finite(floats):
        raise RunFailed(
            f"checkpoint {path}: {name} is not finite on rank {rank}, so it is not published; go on from the newest "
            "one with a lower optim.learning_rate or other data"
        )


def _not_finite(named: list[tuple[str, Tensor]]) -> Iterator[str]:
    """Yields the names of tensors with a number that is not finite. Norms are a tenth of isfinite's price, and infinite
    for large finite numbers too: only those are looked at again."""
    groups = dict[Any, list[tuple[str, Tensor]]]()
    for name, tensor in named:
        groups.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
    for (_, dtype), group in groups.items():
        suspected = group
        if dtype in NORMED:
            finite = torch.stack(norms_of([tensor for _, tensor in group], torch.float32)).isfinite().tolist()
            suspected = [each for each, good in zip(group, finite, strict=True) if not good]
        yield from (name for name, tensor in suspected if not tensor.isfinite().all())


def checkpoint_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, biases: Collection[str] = ()
) -> dict[str, Tensor]:
    """Returns the tensors of the model, with those of its routers' `biases` that are here, and, if given, of the
    optimizer, by their names in a checkpoint: a load fills these same ones. The optimizer's hyperparameters are the
    recipe's."""
    # Parameters, not the module's state dict: that lists a tied weight twice. Names of parameters, not their numbers,
    # so another grouping or layout still matches.
    tensors = {f"{MODEL}{name}": parameter.detach() for name, parameter in kept_parameters(model).items()}
    tensors |= {f"{MODEL}{name}": buffer for name, buffer in model.named_buffers() if name in biases}
    if optimizer is None:
        return tensors
    names = {parameter: name for name, parameter in model.named_parameters()}
    begin_moments(optimizer)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        for moment, tensor in optimizer.state.get(parameter, {}).items():
            assert isinstance(tensor, Tensor), f"{moment} of {names[parameter]} is no tensor"
            tensors[f"{MOMENTS}{names[parameter]}.{moment}"] = tensor
    return tensors


def begin_moments(optimizer: torch.optim.Optimizer) -> None:
    """Has an optimizer that has none make its moments, by a step at rate 0 over gradients of zeros. Collective where a
    step is."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros(()) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def state_facts(sharded: ShardedModel, optimizer: torch.optim.Optimizer, state: TrainState) -> dict[str, Any]:
    """Returns all of a checkpoint that is no tensor."""
    facts = asdict(state) | {
        "ranks": world_facts(sharded),
        OPTIMIZER: state_kind(optimizer, sharded.layout.matrix_parts),
        FLASH: current_flash(),
    }
    model: Any = sharded.model
    facts |= {BIASES: biases} if (biases := saved_biases(sharded)) else {}
    return facts | model.frozen_identities | {"shapes": kept_shapes(sharded.layout, model)}


def kept_shapes(layout: Layout, model: Any) -> dict[str, list[int]]:
    """Returns the full shape of each parameter of the whole model that a checkpoint holds: with adapters or a teacher
    in `model` the trained ones (adapters.kept_parameters)."""
    kept = {name for name, each in layout.placements.items() if each.trained or not model.is_adapted}
    return {name: list(shape) for name, shape in layout.full_shapes.items() if name in kept}


def world_facts(sharded: ShardedModel) -> list[Any]:
    """Returns the world size and the kind of device, to which a rank's random state belongs."""
    return [sharded.layout.world_size, next(sharded.model.parameters()).device.type]


def random_states() -> dict[str, Tensor]:
    """Returns this rank's random states, by their names in a checkpoint."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"{rank_key()}.{device}": state for device, state in states.items()}


def rank_key() -> str:
    return f"own.{dist.get_rank()}"


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not_of_files(error):
            raise
        raise RunFailed(
            f"checkpoint {path}: cannot be written ({type(error).__name__}: {first_line(error)})"
        ) from error


def not_of_files(error: BaseException) -> bool:
    """Returns whether an error is no fault of the files: else people would remove a good checkpoint."""
    return isinstance(error, NOT_OF_FILES) or is_lost_peer(error) or NO_MEMORY in str(error)
