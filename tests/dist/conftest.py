"""An axis's matrix: a test module that names its cases (`AXIS`, a module) asks for `case`, `outcomes` and the rest."""

from functools import cache

import pytest
from cases import outcomes_of, reference_of, run_cases
from tensor_cases import write_models
from world import run_world


def pytest_generate_tests(metafunc):
    cases = getattr(metafunc.module, "AXIS", None)
    if cases and "outcomes" in metafunc.fixturenames:
        chosen = cases.every_case() if metafunc.config.getoption("everything") else cases.covering_cases()
        quick = cases.quick_cases()
        each = [pytest.param(case, marks=[pytest.mark.slow] * (case not in quick), id=case.name) for case in chosen]
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
    results, items = tmp_path_factory.mktemp("results"), request.session.items
    asked = [
        item.callspec.params["case"]
        for item in items
        if item.module is request.module and "outcomes" in item.fixturenames
    ]

    @cache
    def run(world: int) -> None:
        chosen = [case for case in asked if case.world == world]
        assert run_world(world, run_cases, recipe, models, chosen, results) == [[]] * world

    def of(case):
        run(case.world)
        return outcomes_of(case, results)

    return of
