"""State off the device beside tensor and pipeline parallel: the bits of the same layout with all of it on the device."""

import pytest
from cases import Case, assert_case, assert_events, outcomes_of, run_cases, same_bits
from pipeline_cases import deep
from world import run_world

TIERS = {
    "none": (),
    "cpu": ("offload.optimizer=cpu",),
    "cpu-cpu": ("offload.optimizer=cpu", "offload.params=cpu"),
    "nvme": ("offload.optimizer=nvme",),
    "nvme-nvme": ("offload.optimizer=nvme", "offload.params=nvme"),
}
LAYOUTS = {
    "tp": lambda extra: Case("zero3", 1, 1, 3, True, extra=extra, tp=2),
    "pp": lambda extra: Case("zero3", 1, 1, 3, True, extra=extra, pp=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_it(name, recipe, models, tmp_path, wanted_of):
    cases = {}
    for tier, extra in TIERS.items():
        extra += (f"offload.path={tmp_path}",) * ("nvme" in tier)
        cases[tier] = LAYOUTS[name](extra)
    world = cases["none"].world
    assert run_world(world, run_cases, recipe, models, [*cases.values()], tmp_path) == [[]] * world
    none = outcomes_of(cases["none"], tmp_path)
    for tier, case in cases.items():
        found = outcomes_of(case, tmp_path)
        worst = assert_case(case, found, wanted_of(case))
        assert_events(found)
        print(
            name, tier, worst, same_bits(found[0].result, none[0].result), found[0].result.norms == none[0].result.norms
        )
