"""Compiled blocks with collectives inside: one graph, no break, the same numbers, though the ledger counts step 1."""

import shutil

import pytest
from cases import STEPS, Case, assert_case, outcomes_of, run_cases
from planted import replace
from world import run_world

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile on a CPU needs a C++ compiler"
)
BLOCKS = 3
COMPILED = ("train.compile=true", "data.eval_size=0", "train.eval_steps=0")  # an evaluation has graphs of its own


def run_counting(plan, recipe, tiny, case, results):
    """`case` with blocks compiled by aot_eager: graphs, how often one ran, why any broke, and the rank's blocks."""
    import torch

    from shardbook.model.causal_lm import apply_compile

    plan and plan(torch)
    made, runs, blocks, counters = [], [], [], torch._dynamo.utils.counters

    def backend(graph, inputs):
        made.append(1)
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def run(*given):
            runs.append(1)
            return compiled(*given)

        return run

    def count(model):
        blocks.extend(model.blocks)
        for block in blocks:
            block.compile(backend=backend)

    replace(apply_compile, count)
    counters.clear()
    errors = run_cases(recipe, tiny, [case], results)
    assert not errors, errors
    return len(made), len(runs), dict(counters["graph_break"]), len(blocks)


def counts_while_it_traces(torch):
    """Planted bug: the ledger stands in for collectives, and blocks are compiled there."""
    torch.compiler.set_stance = lambda *given: None


@pytest.mark.parametrize(
    "case",
    [
        Case("zero3", 1, 1, 3, True, checkpointing="full", extra=COMPILED, tp=2),
        pytest.param(Case("zero3", 1, 1, 3, True, checkpointing="full", extra=COMPILED, cp=2), marks=pytest.mark.slow),
        pytest.param(Case("zero2", 1, 2, 1, tied=False, extra=COMPILED, tp=2), marks=pytest.mark.slow),
        pytest.param(
            Case("zero2", 1, 1, 3, True, checkpointing="selective", extra=COMPILED, cp=4), marks=pytest.mark.slow
        ),
        pytest.param(Case("zero1", 1, 1, 1, extra=COMPILED, cp=2, tp=2), marks=pytest.mark.slow),
        pytest.param(Case("ddp", 1, 1, 1, extra=COMPILED, tp=4), marks=pytest.mark.slow),
        pytest.param(Case("zero2", 1, 2, 3, True, checkpointing="full", extra=COMPILED, pp=2), marks=pytest.mark.slow),
        pytest.param(Case("zero3", 1, 1, 3, tied=False, extra=COMPILED, pp=2, tp=2), marks=pytest.mark.slow),
        pytest.param(
            Case("zero1", 1, 1, 3, checkpointing="selective", extra=COMPILED, pp=2, cp=2), marks=pytest.mark.slow
        ),
    ],
    ids=lambda case: case.name,
)
def test_one_graph_a_block_and_no_break(case, recipe, tiny, wanted, tmp_path):
    """Every step after the first, which the ledger has eager where blocks hold collectives. What is recomputed is in
    the graph of backward."""
    steps = STEPS - (case.tp * case.cp > 1)
    found = run_world(case.world, run_counting, None, recipe, tiny, case, tmp_path)
    for made, runs, breaks, blocks in found:
        assert (made, breaks) == (1, {})  # all blocks share it
        assert runs == steps * case.micros * blocks
    assert sum(blocks for *_, blocks in found) == BLOCKS * case.world // case.pp
    print(f"\nworst {assert_case(case, outcomes_of(case, tmp_path), wanted(case)):.1e}  {case.name}")


@pytest.mark.slow
def test_a_trace_through_the_ledger_turns_it_red(recipe, tiny, tmp_path):
    case = Case("zero3", 1, 1, 1, extra=COMPILED, tp=2)
    for made, runs, breaks, _ in run_world(2, run_counting, counts_while_it_traces, recipe, tiny, case, tmp_path):
        assert made > 1 and breaks and runs > (STEPS - 1) * BLOCKS
        print(f"\n{made} graphs, {runs} runs, {len(breaks)} breaks")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_fused_kernels_too(axis, recipe, tiny, wanted, tmp_path):
    case = Case("zero3", 1, 1, 3, True, checkpointing="selective", extra=("train.compile=true",), **{axis: 2})
    assert run_world(2, run_cases, recipe, tiny, [case], tmp_path) == [[], []]
    print(f"\nworst {assert_case(case, outcomes_of(case, tmp_path), wanted(case)):.1e}  {case.name}")
