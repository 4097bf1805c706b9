"""The teacher in distillation: a frozen CausalLM inside the student, sharded beside it in units of its own.

Invariant: it runs forward only, before the model's own blocks, under no_grad; so its activations are freed by then, and
its parameters get no gradient. They are in no optimizer, no checkpoint and no export.
"""

from typing import Any

from torch import Tensor

from shardbook.model.causal_lm import CausalLM
from shardbook.model.marks import FORWARD_ONLY, GATHERED, RESHARDED


def pass_on(hidden: Tensor, *_: Any) -> Tensor:
    """Returns the hidden states, from which the loss computes a teacher's logits in chunks. The head is called although
    it computes nothing: the hooks of its unit wait for each module in it."""
    return hidden


def attach_teacher(model: CausalLM, teacher: CausalLM) -> None:
    """Puts `teacher` into `model`, frozen. Its head's unit stays gathered until the backward of a micro-batch is over:
    the model's own head reads its weight."""
    teacher.requires_grad_(False)
    teacher.head.forward = pass_on
    for part in teacher.parts:
        for module in part:
            setattr(module, FORWARD_ONLY, GATHERED if teacher.head in part else RESHARDED)
    model.teacher = teacher
    model.is_adapted = True
