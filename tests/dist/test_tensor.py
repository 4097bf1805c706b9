"""Tensor parallel: beside every stage the numbers of one plain process, exact bytes, and files that know nothing of it."""

from functools import cache

import pytest
from cases import assert_case, outcomes_of, reference_of, run_cases
from tensor_cases import covering_cases, every_case, quick_cases, write_models
from world import run_world


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = every_case() if metafunc.config.getoption("everything") else covering_cases()
        quick = quick_cases()
        each = [pytest.param(case, marks=[pytest.mark.slow] * (case not in quick), id=case.name) for case in cases]
        metafunc.parametrize("case", each)


@pytest.fixture(scope="module")
def models(tiny):
    write_models(tiny)
    return tiny


@pytest.fixture(scope="module")
def wanted_of(recipe, models):
    return reference_of(recipe, models)


@pytest.fixture(scope="module")
def outcomes(recipe, models, tmp_path_factory, request):
    """The outcomes of a case by rank; the first case of a world runs all of that world's that were asked for."""
    results = tmp_path_factory.mktemp("results")
    asked = [item.callspec.params["case"] for item in request.session.items if is_case(item)]

    @cache
    def run(world: int) -> None:
        chosen = [case for case in asked if case.world == world]
        assert run_world(world, run_cases, recipe, models, chosen, results, seconds=3600) == [[]] * world

    def of(case):
        run(case.world)
        return outcomes_of(case, results)

    return of


def is_case(item) -> bool:
    return getattr(item, "function", None) is test_parity_and_exact_bytes


def test_parity_and_exact_bytes(case, outcomes, wanted_of):
    worst = assert_case(case, outcomes(case), wanted_of(case))
    print(f"\nworst {worst:.1e}  {case.name}")
