"""Every planted bug turns the parity suite red; without it the same case is green. The score is printed at the end."""

from itertools import groupby

import pytest
from bugs import BUGS, run_planted
from cases import assert_case, outcomes_of, run_cases
from world import run_world


@pytest.mark.slow
def test_without_a_bug_each_case_is_green(recipe, models, tmp_path, wanted_of):
    cases = sorted({case for _, case, _ in BUGS.values()}, key=lambda case: (case.world, case.name))
    for world, same in groupby(cases, key=lambda case: case.world):
        chosen = list(same)
        assert run_world(world, run_cases, recipe, models, chosen, tmp_path) == [[]] * world
        for case in chosen:
            assert_case(case, outcomes_of(case, tmp_path), wanted_of(case))


IN_MAKE_TEST = (
    "token_count_not_reduced",
    "hsdp_all_reduce_skipped",
    "local_gradient_norm",
    "tied_weights_in_two_groups",
    "padding_not_counted",
    "uncut_gradients_not_summed",
    "slopes_of_another_micro",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_MAKE_TEST)) for name in BUGS]
)
def test_a_planted_bug_turns_the_suite_red(name, recipe, models, tmp_path, wanted_of):
    _, case, refused = BUGS[name]
    try:  # it must run to its end, and be wrong; or be refused for what it is
        run_world(case.world, run_planted, name, recipe, models, [case], tmp_path)
    except AssertionError as error:
        assert refused and refused in str(error)
        print(f"{name}: refused: {refused}")
        return
    with pytest.raises(AssertionError) as red:
        assert_case(case, outcomes_of(case, tmp_path), wanted_of(case))
    print(f"{name}: {str(red.value).strip().splitlines()[0]}")
