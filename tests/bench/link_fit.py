"""The planner's time, calibrated on two variants of the link bench at one rate, and what it says of all the others.

A rank's computing is one number that no variant changes, and what crosses the link is the planner's own: `Layout`,
rings, calls. Ranks of one node share its cores with gloo: neither hides the other, and a step takes the p-norm of
both times. That power, SHARING, and which two variants tell most, were chosen when the data were known.
"""

from dataclasses import replace

from link import SHAPE, VARIANTS
from transformers import AutoConfig

from shardbook.gpus import GPUS
from shardbook.model.attention import KERNELS
from shardbook.model.causal_lm import build_model
from shardbook.parallel.layout import Layout, build_layout
from shardbook.parallel.units import Unit
from shardbook.plan.hardware import Cluster
from shardbook.plan.speed import exposed_seconds
from shardbook.recipe import Parallel, Precision
from shardbook.run.calibration_runs import CalibrationRun, calibrate

MBIT = {"unlimited": 1e9, "1gbit": 1000, "200mbit": 200, "50mbit": 50}
KNOWN_RATE, KNOWN = "1gbit", ("qwZ", "qwZ+hpZ")
SHARING = 1.5


def lay_out() -> dict[str, Layout]:
    model = build_model(AutoConfig.for_model("llama", **SHAPE), "fp32", 0, KERNELS["sdpa"])
    precision = Precision(params="fp32", reduce="fp32", master="fp32")
    parts = (model, model.parts, model.blocks)
    return {name: build_layout(Parallel(**keys), precision, *parts, 4, 2) for name, keys in VARIANTS.items()}


def step_seconds(layout: Layout, rate: str, cluster: Cluster) -> float:
    """Of computing, `slowness` seconds in all, and of all that the link sends."""
    computing, sends = cluster.slowness, list[float]()

    def note(number: int, what: str, unit: Unit | None, began: float, ended: float) -> None:
        if what in ("gather", "reduce"):
            sends.append(ended - began)

    on_link = replace(cluster, nics=MBIT[rate] / 1000)
    exposed_seconds(layout, on_link, 1, computing / 3, 2 * computing / 3, note=note)
    return (computing**SHARING + sum(sends) ** SHARING) ** (1 / SHARING)


def predict(medians: dict, known_rate: str = KNOWN_RATE, known: tuple[str, ...] = KNOWN) -> dict[str, dict[str, float]]:
    """Seconds a step by rate and variant, from two of them."""
    layouts = lay_out()
    gpu = replace(GPUS["h100-80gb"], link=1e18)  # inside a node: computing
    cluster = Cluster(gpu, gpus=4, a_node=2, nics=1.0)

    def sample(name: str) -> CalibrationRun:
        return CalibrationRun(
            medians[known_rate][name]["seconds"], lambda found: step_seconds(layouts[name], known_rate, found)
        )

    found = calibrate(cluster, [sample(name) for name in known])
    return {rate: {name: step_seconds(layouts[name], rate, found) for name in layouts} for rate in medians}
