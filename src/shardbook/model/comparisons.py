"""Our small model of a family is compared with transformers' own: its files, cached steps, blocks as pipeline stages.

Each comparison takes our model and returns the reason why the family cannot do a thing, empty where it can, or raises
Unfit where it cannot be trained at all.
"""

import io
import traceback
from dataclasses import replace
from itertools import pairwise, starmap
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from shardbook.model.attention import KERNELS, use_attention
from shardbook.model.batch import Batch
from shardbook.model.blocks import copy_view, keep_blocks
from shardbook.model.causal_lm import CausalLM
from shardbook.model.file_buffers import stored_buffers
from shardbook.model.hf_model import Unfit
from shardbook.model.weight_files import StoredTensor
from shardbook.recipe import RecipeError, first_line

TOLERANCE = 1e-5  # of the loss, and of gradients over the norm of the whole; the smallest leak that was seen is 2e-5
# of a cached step's logits: rounding was seen up to 3e-6 (a recurrence), and the smallest that was wrong is off by 7e-2
CACHED_TOLERANCE = 1e-4
STEPS = 3  # tokens that are added to a prompt

LossAndGradients = tuple[Tensor, dict[str, Tensor | None]]


def compare_files(model: CausalLM, theirs: PreTrainedModel) -> None:
    """Raises Unfit where the files that transformers writes of `theirs` do not fill `model`, which has its numbers, or
    where `model` writes others."""
    parameters = dict(model.named_parameters()) | stored_buffers(model)  # as load_weights asks for them
    tensors = {name: tensor.detach() for name, tensor in parameters.items()}
    state = {name: tensor for name, tensor in theirs.state_dict().items() if name in tensors}
    try:
        wanted = revert_weight_conversion(theirs, state)
        written = dict(model.files.to_files(tensors.items()))
        stored = model.files.by_model_names({name: in_memory(tensor) for name, tensor in wanted.items()})
        if missing := [name for name in tensors if name not in stored]:
            raise Unfit(f"its files, as transformers writes them, lack {missing[0]}")
        shapes = {name: torch.Size(stored[name].shape) for name in tensors}
        if other := [name for name, tensor in tensors.items() if shapes[name] != tensor.shape]:
            raise Unfit(f"no file can fill it: {other[0]} is not made of rows of its files' tensors")
        filled = {name: stored[name].read_rows(slice(0, *shape[:1] or [1])) for name, shape in shapes.items()}
    except Exception as error:
        raise_if_ours(error)
        raise Unfit(f"no file can fill it ({describe_error(error)})") from None
    pairs = [(filled[name].view(tensor.shape), tensor) for name, tensor in tensors.items()]
    pairs += [(written[name], tensor) for name, tensor in wanted.items() if name in written]
    if written.keys() != wanted.keys() or not all(starmap(torch.equal, pairs)):
        raise Unfit("its files are not those that transformers writes of it")


def in_memory(tensor: Tensor) -> StoredTensor:
    """Returns a tensor, in fp32, as if a file had it."""
    return StoredTensor(Path("memory"), io.BytesIO(tensor.float().numpy().tobytes()), "F32", tuple(tensor.shape), 0)


def compare_eager(model: CausalLM, batch: Batch, wanted: LossAndGradients) -> str:
    """Has `model` call its family's own eager attention from now on, as a run does whose kernels know not all of its
    arguments. Returns how far it is then off; empty where it is right."""
    use_attention(model.config, KERNELS["eager"])
    try:
        loss, gradient = differences(gradients_of(model, model(batch, summed=True)), wanted)
    except Exception as error:
        raise_if_ours(error)
        return describe_error(error)
    return "" if max(loss, gradient) < TOLERANCE else f"loss off by {loss:.0e}, gradients by {gradient:.0e}"


def heeds_positions(model: CausalLM, batch: Batch) -> bool:
    """Returns whether positions change what `model` computes: a slice of a row begins at one of its own."""
    with torch.no_grad():
        losses = [model(replace(batch, position_ids=times * batch.position_ids), summed=True) for times in (1, 3)]
    return not torch.equal(*losses)


def run_in_stages(model: CausalLM, batch: Batch, wanted: LossAndGradients) -> str:
    """Returns the reason why the layers of `model` cannot lie on several ranks; empty where they can: each block is a
    stage by itself, so that what one passes to a later one is missed wherever it is."""
    base, names, count = model.base, model.names, len(model.all_blocks)
    if count == 1:
        return "it has one block"
    outside = set(base.parameters()) - {p for block in model.blocks for p in block.parameters()}
    outside -= {p for part in (model.embedding, model.norm) if part is not None for p in part.parameters()}
    if outside:
        return "it has parameters beside its embedding, blocks and last norm"
    if not names.norm:
        return "its last norm is not found"
    stages = [copy_view(model) for _ in range(count)]
    for number, stage in enumerate(stages):
        keep_blocks(stage, [number], number == 0, number == count - 1)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sums = dict[str, Tensor | None](dict.fromkeys(wanted[1]))
    try:
        outputs, received = [stages[0](batch)], list[Tensor]()
        for number, stage in enumerate(stages[1:], start=1):
            if outputs[-1].shape != (*batch.input_ids.shape, model.config.hidden_size):
                return "its blocks pass on more than hidden states"
            received.append(outputs[-1].detach().requires_grad_())
            outputs.append(stage(batch, summed=number == count - 1, hidden=received[-1]))
        grad_output = None
        for output, hidden in zip(reversed(outputs), [*reversed(received), None], strict=True):
            inputs = [*named.values(), *([] if hidden is None else [hidden])]
            gradients = torch.autograd.grad(output, inputs, grad_output, allow_unused=True)
            for name, term in zip(named, gradients, strict=False):
                if term is not None:
                    sums[name] = term if (total := sums[name]) is None else total + term
            grad_output = gradients[-1]
    except Exception as error:
        raise_if_ours(error)
        return f"its blocks pass on more than hidden states ({describe_error(error)})"
    if max(differences((outputs[-1].detach(), sums), wanted)) > TOLERANCE:
        return "its blocks pass on more than hidden states"
    return ""


@torch.no_grad()
def decode_by_steps(model: CausalLM, theirs: nn.Module, rows: list[Tensor]) -> str:
    """Returns the reason why `model` cannot continue prompts token by token with a cache, as samples do; empty where it
    can: the logits are those of `theirs` of each whole row."""
    if not model.cache_argument:
        return "its forward takes no cache"
    try:
        wanted = torch.stack([theirs(input_ids=row[None], use_cache=False).logits[0, -STEPS - 1 :] for row in rows])
        off = relative_error(cached_logits(model, rows), wanted)
    except Exception as error:
        raise_if_ours(error)
        return f"its forward with a cache fails ({describe_error(error)})"
    return "" if off < CACHED_TOLERANCE else f"with a cache it computes other logits (off by {off:.0e})"


@torch.no_grad()
def cached_logits(model: CausalLM, rows: list[Tensor]) -> Tensor:
    """Returns the logits [B, STEPS + 1, vocabulary] after prompts, padded on the left, and after each of STEPS further
    tokens, with a cache. A prompt is one of `rows`, of any length, but for its last STEPS tokens."""
    width = max(map(len, rows))
    ids, attended = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :], attended[number, width - len(row) :] = row, 1
    cache, places = DynamicCache(config=model.config), (attended.cumsum(-1) - 1).clamp(min=0)
    steps = pairwise([0, *range(width - STEPS, width + 1)])
    logits = [model(ids[:, start:end], places[:, start:end], attended[:, :end], cache=cache) for start, end in steps]
    return torch.stack(logits, 1)


def relative_error(computed: Tensor, wanted: Tensor) -> float:
    """Returns the norm of a difference over that of what is wanted; 1 where numbers are not finite."""
    off = ((computed - wanted).norm() / wanted.norm()).item()
    return off if off == off else 1.0


def raise_if_ours(error: Exception) -> None:
    """Raises an `error` of a forward or a backward again where code of this package raised it: an Unfit, or a bug that
    Python found. A RuntimeError is torch's answer to what it is asked for, and a RecipeError says what is not known."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_here = frame.f_globals["__name__"].partition(".")[0] == __name__.partition(".")[0]
    if is_here and not isinstance(error, RuntimeError | RecipeError):
        raise error


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def gradients_of(model: nn.Module, loss: Tensor) -> LossAndGradients:
    """Returns a loss and its gradients by name."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    none = {name: None for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return loss.detach(), none | dict(zip(named, gradients, strict=True))


def differences(computed: LossAndGradients, wanted: LossAndGradients) -> tuple[float, float]:
    """Returns how far a loss is off, relatively, and the largest difference of a gradient over the norm of them all."""
    loss = abs((computed[0] / wanted[0] - 1).item())
    total_norm = torch.stack([g.norm() for g in wanted[1].values() if g is not None]).norm()
    worst = 0.0
    for name, gradient in wanted[1].items():
        pair = [torch.zeros(1) if g is None else g.flatten() for g in (gradient, computed[1][name])]
        worst = max(worst, ((pair[1] - pair[0]).norm() / total_norm).item())
    return (loss, worst) if loss == loss and worst == worst else (1.0, 1.0)
