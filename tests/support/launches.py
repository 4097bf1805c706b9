"""Counts what would be launched on a GPU: operations that compute something of more than one number."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        first = made[0] if isinstance(made, list | tuple) and made else made
        is_view = function.is_view or function is torch.ops.aten.detach.default
        self.count += isinstance(first, torch.Tensor) and first.ndim > 0 and not is_view
        return made
