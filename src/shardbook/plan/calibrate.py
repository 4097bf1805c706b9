"""A plan's constants, fitted to measured steps: the slowness of computing, and the share of its cards' rate that a
network attains.

Invariant: only constants that measurements tell apart are fitted: one run, or runs that never waited, give slowness.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardbook.plan.hardware import Cluster

LOWEST, HIGHEST = 0.1, 20.0  # bounds of either constant against a data sheet's share
ROUNDS, SPLITS = 10, 24  # of the search: one constant after the other, each by golden section


@dataclass(frozen=True)
class Sample:
    """A measured step, and the plan's prediction of it."""

    seconds: float
    predict: Callable[[Cluster], float]  # seconds of the same step on that cluster


def calibrate(cluster: Cluster, samples: Sequence[Sample]) -> Cluster:
    """Returns `cluster` with the constants that predict `samples` best: least squares of the ratios' logarithms."""

    def miss(found: Cluster) -> float:
        return sum(math.log(sample.predict(found) / sample.seconds) ** 2 for sample in samples)

    names = ["slowness"]
    network = replace(cluster, across=cluster.across / 2)
    if len(samples) > 1 and any(sample.predict(network) != sample.predict(cluster) for sample in samples):
        names.append("across")
    for _ in range(ROUNDS if len(names) > 1 else 1):
        for name in names:
            cluster = _nearest(cluster, name, miss)
    return cluster


def _nearest(cluster: Cluster, name: str, miss: Callable[[Cluster], float]) -> Cluster:
    """Returns the cluster with the value of `name` that misses least, by golden section over its logarithm."""
    golden = (math.sqrt(5) - 1) / 2
    low, high = math.log(LOWEST), math.log(HIGHEST)

    def at(place: float) -> Cluster:
        value: Any = math.exp(place)
        return replace(cluster, **{name: value})

    left, right = high - golden * (high - low), low + golden * (high - low)
    of_left, of_right = miss(at(left)), miss(at(right))
    for _ in range(SPLITS):
        if of_left <= of_right:
            high, right, of_right = right, left, of_left
            left = high - golden * (high - low)
            of_left = miss(at(left))
        else:
            low, left, of_left = left, right, of_right
            right = low + golden * (high - low)
            of_right = miss(at(right))
    return at((low + high) / 2)
