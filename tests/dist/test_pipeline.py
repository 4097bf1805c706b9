"""Pipeline parallel: beside every stage the numbers of one plain process, exact bytes, and what composes with it."""

import pipeline_cases
from cases import assert_case

AXIS = pipeline_cases


def test_parity_and_exact_bytes(case, outcomes, wanted_of):
    worst = assert_case(case, outcomes(case), wanted_of(case))
    print(f"\nworst {worst:.1e}  {case.name}")
