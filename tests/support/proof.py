"""Writes docs/proof.md: every stage against one plain process, every planted bug, every byte, from runs made now.

make proof
"""

import argparse
import subprocess
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import conftest  # noqa: F401  # offline, caches of its own
import context_cases
import pipeline_cases
import tensor_cases
from bugs import BUGS, run_planted
from cases import (
    STEPS,
    TOLERANCE,
    Case,
    assert_case,
    covering_cases,
    every_case,
    layouts,
    outcomes_of,
    reference_of,
    run_cases,
    same_bits,
)
from recompute import LAYERS, build, build_batch, flops, gradients, kept_bytes
from smallest import STAGES, measure
from smallest import table as smallest_table
from tensor_cases import SAID, write_models
from tiny import write_all, write_recipe
from world import run_world

from shardbook.plan.formulas import paper_resident
from shardbook.recipe import find_stage

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "proof.md"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--covering", action="store_true", help="the cases of `make test`, not the whole matrix")
    parser.add_argument("--everything", action="store_true", help="some 400 to 700 cases of each axis, an hour more")
    parser.add_argument("--out", type=Path, default=PAGE)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder)
        write_all(tiny)
        recipe = write_recipe(tiny, tiny / "out")
        write_models(tiny)
        cases = covering_cases() if asked.covering else every_case()
        sections = [
            header(),
            parity(recipe, tiny, cases),
            *(axis(title, recipe, tiny, asked.everything) for title in AXES),
            planted(recipe, tiny),
            ledger(recipe, tiny),
            memory(recipe, tiny),
            recomputation(),
            smallest(),
        ]
    asked.out.write_text("\n\n".join(sections) + "\n")
    print(asked.out)
    return 0


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def header() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return f"""# Proof

Written by `make proof` from runs on gloo, CPU, torch {torch.__version__}, commit {commit.stdout.strip() or "unknown"}.
Each number here is asserted by a test too (`tests/dist`, `tests/unit/memory/test_activation.py`)."""


def rows(head: list[str], lines: list[list[object]]) -> str:
    shown = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in shown)


def run_all(recipe: Path, tiny: Path, cases: list[Case], folder: Path) -> None:
    for world, same in groupby(sorted(cases, key=lambda case: case.world), key=lambda case: case.world):
        chosen = list(same)
        say(f"{len(chosen)} runs of {world} ranks")
        assert run_world(world, run_cases, recipe, tiny, chosen, folder) == [[]] * world


def parity(recipe: Path, tiny: Path, cases: list[Case]) -> str:
    wanted, lines = reference_of(recipe, tiny), []
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        run_all(recipe, tiny, cases, results)
        say("against the plain process")
        key = lambda case: (case.world, case.stage != "ddp", case.stage, case.replicas)  # noqa: E731
        for _, same in groupby(sorted(cases, key=key), key=key):
            group = list(same)
            worst = max(assert_case(case, outcomes_of(case, results), wanted(case)) for case in group)
            first = group[0]
            lines.append([first.world, f"`{first.stage}`", first.replicas, first.shards, len(group), f"{worst:.1e}"])
        said = []
        for micros, stages in ((1, ["ddp", "zero1", "zero2", "zero3"]), (3, ["ddp", "zero1"]), (3, ["zero2", "zero3"])):
            layout = {stage: (2, 1) if stage == "ddp" else (1, 2) for stage in stages}
            found = [outcomes_of(Case(stage, *layout[stage], micros), results)[0].result for stage in stages]
            assert all(same_bits(found[0], other) for other in found[1:])
            said.append(f"{', '.join(stages)} with {micros} micro-batch{'es' * (micros > 1)}")
    return f"""## Parity

Each run trains a tiny Llama in fp32 for {STEPS} steps through the whole of `train()`, with an evaluation in between.
It is compared with one process of plain PyTorch (`tests/support/reference.py`): losses, gradient norms, the whole
gradient of every step and the final weights. A row stands for the runs with 1, 2 or 3 micro-batches, with and without
clipping, with tied and untied embeddings (vocabulary 259 and 287), with and without activation checkpointing. `worst`
is the largest relative error among them and must stay below 1e-6. In each run the traffic and memory of every rank
were as predicted, to the byte, and replicas were equal to the bit.

{rows(["ranks", "stage", "dp_replicate", "dp_shard", "runs", "worst"], lines)}

{len(cases)} runs. Bit for bit the same losses, gradients and weights on two ranks: {"; ".join(said)}."""


AXES = {  # beside a stage: the cases of each, what its section says
    "Tensor parallel": (
        tensor_cases,
        "The same comparison with `parallel.tp_size`. Tensors that are not split were equal to the bit on all tp ranks",
    ),
    "Context parallel": (
        context_cases,
        "The same comparison with `parallel.cp_size`, on rows of several documents, which the slices of ranks cut",
    ),
    "Pipeline parallel": (
        pipeline_cases,
        "The same comparison with `parallel.pp_size`. Both copies of a tied weight were equal to the bit",
    ),
}


def axis(title: str, recipe: Path, tiny: Path, everything: bool) -> str:
    module, said = AXES[title]
    cases = module.every_case() if everything else module.covering_cases()
    wanted, lines, wrong = reference_of(recipe, tiny), [], []
    found: dict[Case, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        run_all(recipe, tiny, cases, results)
        say(f"{title}: against the plain process")
        for case in cases:
            try:
                found[case] = assert_case(case, outcomes_of(case, results), wanted(case))
            except AssertionError as error:
                wrong.append(f"{case.name}: {str(error).splitlines()[0][:150]}")
    if wrong:
        raise SystemExit("\n".join([f"{title}: {len(wrong)} of {len(cases)} cases are red", *wrong]))
    key = lambda case: (along(case), case.replicas * case.shards, case.stage != "ddp", case.stage)  # noqa: E731
    kinds = [("llama, 4 heads, 2 of keys", [case for case in cases if not case.model])]
    kinds += [(said_of, [case for case in cases if case.model == name]) for name, said_of in SAID.items()]
    kinds += [("llama of 7 blocks", [case for case in cases if case.model.startswith("deep")])]
    for said_of, own in kinds:
        for (sizes, ranks), same in groupby(sorted(own, key=key), key=lambda case: key(case)[:2]):
            group = list(same)
            stages = ", ".join(f"`{stage}`" for stage in dict.fromkeys(case.stage for case in group))
            worst = max(found[case] for case in group)
            lines.append([said_of, sizes, ranks, stages, len(group), f"{worst:.1e}"])
    return f"""## {title}

{said}. The worst of each row must stay below {TOLERANCE:.0e}. Traffic was as predicted, to the byte, on every
rank and axis.

{rows(["model", "axes", "data-parallel ranks", "stages", "runs", "worst"], lines)}

{len(cases)} runs, the worst {max(found.values()):.1e}."""


def along(case: Case) -> str:
    """The axes beside those of the stage."""
    schedule = f"pp {case.pp} {case.schedule}" + f" {case.chunks}" * (case.chunks > 1)
    sizes = ((case.pp, schedule), (case.cp, f"cp {case.cp}"), (case.tp, f"tp {case.tp}"))
    return ", ".join(said for size, said in sizes if size > 1)


def planted(recipe: Path, tiny: Path) -> str:
    wanted, lines = reference_of(recipe, tiny), []
    for name, (_, case, refused) in BUGS.items():
        say(f"bug: {name}")
        with tempfile.TemporaryDirectory() as folder:
            seen = symptom(name, case, refused, recipe, tiny, Path(folder), wanted)
        lines.append([name.replace("_", " "), case.layout, seen])
    return f"""## Planted bugs: {len(lines)} of {len(lines)} turn the suite red

Each bug is patched into the package in the processes of a run. The run goes to its end; then everything is compared
as above.

{rows(["bug", "planted in", "what goes red first"], lines)}"""


def symptom(name, case, refused, recipe, tiny, folder, wanted) -> str:
    """What goes red first. A crash that is not torch's own refusal, or nothing red at all, ends this program."""
    try:
        run_world(case.world, run_planted, name, recipe, tiny, [case], folder)
    except AssertionError as error:
        if refused and refused in str(error):
            return f"refused: {refused}"
        raise
    try:
        assert_case(case, outcomes_of(case, folder), wanted(case))
    except AssertionError as error:
        return str(error).splitlines()[0][:90].split(": measured")[0].split(" against")[0]
    raise SystemExit(f"planted bug {name}: everything stayed green")


def ledger(recipe: Path, tiny: Path) -> str:
    lines = []
    chosen = [(stage, *layout) for stage, *layout in layouts(2)[:4]] + [("hsdp", 2, 2)]
    cases = [Case(*layout, micros) for layout in chosen for micros in (1, 3)]
    with tempfile.TemporaryDirectory() as folder:
        run_all(recipe, tiny, cases, Path(folder))
        for case in cases:
            measured, predicted = outcomes_of(case, Path(folder))[0].traffic
            assert measured == predicted
            for (op, axis), volume in sorted(measured.items()):
                said = predicted[op, axis]
                numbers = [f"{said.calls} x, {said.payload_bytes:,} B", f"{volume.calls} x, {volume.payload_bytes:,} B"]
                lines.append([f"`{case.layout}`", case.micros, op, axis, *numbers])
    return f"""## Ledger: predicted and measured

The calls and payload of one optimizer step of a rank: predicted from the stage table and the shapes, and counted in
the first step of the run. The padding of uneven shards is included: 259 rows over two ranks count as 260. An
all-reduce of 8 bytes is the gradient norm, one of 24 bytes the token counts of the step. Collectives of one
operation over the same ranks are in one row.

{rows(["stage", "micro-batches", "operation", "axis", "predicted", "measured"], lines)}"""


def memory(recipe: Path, tiny: Path) -> str:
    lines = []
    cases = [Case(*layout) for layout in [*layouts(2)[:4], ("hsdp", 2, 2)]]
    with tempfile.TemporaryDirectory() as folder:
        run_all(recipe, tiny, cases, Path(folder))
        for case in cases:
            outcome = outcomes_of(case, Path(folder))[0]
            measured, predicted = outcome.memory
            assert measured == predicted
            count = sum(weight.numel() for weight in outcome.result.weights.values())
            theirs = paper_resident(find_stage(case.stage), count, case.shards)
            kinds = [f"memory/{kind}_bytes" for kind in ("params", "grads", "optimizer")]
            lines.append([f"`{case.layout}`", *(f"{predicted[kind]:,} / {measured[kind]:,}" for kind in kinds)])
            lines[-1].append(f"{theirs.total_bytes:,.0f}")
    return f"""## Memory: predicted and measured

The persistent bytes of rank 0, predicted / measured. Weights, gradients and AdamW's two moments are in fp32 and
sharded as DTensors; a bf16 copy exists only while it is gathered. The ZeRO paper counts 2 + 2 + 12 bytes per
parameter instead; its total stands in the last column.

{rows(["stage", "parameters", "gradients", "optimizer", "the paper's total"], lines)}"""


def recomputation() -> str:
    say("activation checkpointing")
    micro, lines = build_batch(), []
    plain_flops, plain = flops("none", micro), gradients(build("none"), micro)
    for kind in ("none", "full", "every:2", "selective"):
        again = gradients(build(kind), micro)
        bitwise = all(torch.equal(again[name], gradient) for name, gradient in plain.items())
        extra = flops(kind, micro) - plain_flops
        lines.append(
            [f"`{kind}`", f"{extra:,}", f"{kept_bytes(kind, micro):,}", "bitwise" if bitwise else "**differ**"]
        )
    for budget in ("budget:1.0", "budget:0.5", "budget:0"):
        torch._dynamo.reset()
        lines.append([f"`{budget}`, compiled", "", f"{kept_bytes(budget, micro, compiled=True):,}", "to 1e-5"])
    return f"""## Activation checkpointing

A step of {LAYERS} blocks: the FLOPs that are computed a second time, the bytes that are kept between forward and
backward, and the gradients compared with those of `none`.

{rows(["checkpointing", "FLOPs again", "bytes kept", "gradients"], lines)}"""


def smallest() -> str:
    say("the transformer of 260 parameters")
    measured = {stage: run_world(2, measure, stage, {})[0] for stage in STAGES}
    return f"""## The transformer of 260 parameters

Bytes on two ranks; [a page explains each of them](260-parameters.md).

{smallest_table(measured)}"""


if __name__ == "__main__":
    sys.exit(main())
