"""The plain tensors that a rank has of a DTensor: with and without autograd, and inside a quantised one.

Optimizers, checkpoints, metrics and heads ask here. Nothing is communicated.
"""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, whose gradient goes on to the DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_values(tensor: Tensor) -> Tensor:
    """Returns this rank's part of `tensor`, detached from autograd."""
    return local_part(tensor).detach()


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors in this rank's part of `tensor`: of one of eight bits its codes, scales and table."""
    tensor = local_part(tensor)
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    return [part for name in names for part in plain_tensors(getattr(tensor, name))] or [tensor]
