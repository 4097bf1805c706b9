"""A lost peer: recognizes by torch's errors that another rank or the store is gone.

torch has classes for some (DistError and its subclasses); gloo raises a plain RuntimeError, whose message alone says
what happened. The messages are torch 2.13.0's, and tests/dist/test_lost.py provokes each: other words turn it red.
Invariant: an unknown message is this rank's own failure, printed with its traceback.
"""

import re

import torch.distributed as dist

BROKEN = re.compile(r"Connection \w+ by peer( \[[^]]+])?")  # "reset" or "closed", gloo's


def is_lost_peer(error: BaseException) -> bool:
    """Returns whether `error` came from another rank, by a collective or the store, so this rank knows no reason."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def broken_connection(error: BaseException) -> str:
    """Returns how the connection to the other rank ended, or an empty string where `error` does not tell."""
    match = BROKEN.search(str(error))
    return match[0] if match else ""


def is_closed_store(error: BaseException) -> bool:
    """Returns whether the process that kept the store closed the connection, or is gone; else it is only silent."""
    return bool(re.search(r"reset|[Bb]roken pipe|got 0 bytes|closed|refused", str(error)))


def is_out_of_reach(error: BaseException) -> bool:
    """Returns whether gloo found no route to another rank that was there, rather than lost it on the way."""
    return "connectFullMesh" in str(error) and not broken_connection(error)
