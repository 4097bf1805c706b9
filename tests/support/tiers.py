"""Which of the slow tests CI runs: some cases of a long product are run there, all of them by `make everything`.

Invariant: a test that plants something is never left out. Which cases stay depends on their names alone: each machine
and each worker chooses the same, and a case more or less in a product changes no more than one of those that stay.
"""

import collections
import hashlib

import pytest

STAY = {  # a file or a test -> how many of its slow cases CI runs; all, where it is not named
    # one walk through the planner for each, whose parts have tests of their own
    "tests/unit/plan/test_module.py::test_the_peak_is_that_of_a_step": 9,
    "tests/unit/plan/test_module.py::test_the_peak_in_fp32": 1,
    "tests/unit/plan/test_simulate.py::test_ranks_that_share_matrices_or_rows": 7,
    "tests/unit/plan/test_simulate.py::test_adapters_on_a_frozen_base": 2,
    "tests/unit/plan/test_simulate.py::test_the_gradient_of_a_head_is_cast_beside_its_sum": 2,
    "tests/unit/plan/test_simulate.py::test_the_formula_is_what_a_step_makes": 2,
    "tests/unit/plan/test_simulate.py::test_shipped_recipes_at_their_size": 1,
    "tests/unit/plan/test_simulate.py::test_a_teacher_beside": 1,
    "tests/unit/plan/test_simulate.py::test_two_small_models_tell_of_a_deep_one_exactly": 1,
    "tests/unit/plan/test_simulate.py::test_a_rank_whose_experts_are_chosen_more_often": 2,
    "tests/unit/plan/test_peak_of_pipelines.py::test_stages_take_what_the_plan_says": 2,
    "tests/unit/plan/test_measure_blocks.py::test_a_plan_of_any_family": 2,
    "tests/unit/docs/test_build.py::test_the_plans_of_the_goals_fit": 4,
    "tests/dist/test_peak_steps.py::test_a_step_makes_what_is_predicted": 1,
    "tests/dist/test_peak_steps.py::test_ranks_that_split_rows": 1,
    "tests/dist/test_peak_steps.py::test_a_long_row_takes_half_the_memory_on_two_ranks": 0,
    # layouts, of which the matrices of stages and axes stay whole
    "tests/dist/test_tensor.py::test_other_knobs_and_exact_bytes": 2,
    "tests/dist/test_context.py::test_other_knobs_and_exact_bytes": 2,
    "tests/dist/test_pipeline.py::test_other_knobs_and_exact_bytes": 3,
    "tests/dist/test_pipeline.py::test_every_schedule_has_the_bits_of_one_stage": 1,
    "tests/dist/test_lora_axes.py::test_it_is_peft_in_one_process": 1,
    "tests/dist/test_lora_axes.py::test_files_know_nothing_of_the_axes": 2,
    "tests/dist/test_lora_axes.py::test_before_the_first_adapter_no_gradient_is_sent": 3,
    "tests/dist/test_lora_axes.py::test_compiled_it_is_the_same": 1,
    "tests/dist/test_qlora_axes.py::test_the_bytes_are_those_of_one_process": 5,
    "tests/dist/test_qlora_axes.py::test_it_is_peft_on_the_rounded_base": 1,
    "tests/dist/test_qlora_axes.py::test_compiled_it_is_the_same": 1,
    "tests/dist/test_generate.py::test_more_ranks_that_share_a_model_continue_as_one": 1,
    "tests/dist/test_distill.py::test_ranks_that_share_a_model_share_its_teacher": 0,
    "tests/dist/test_dpo.py::test_beside_pipeline_and_context_parallel": 0,
    "tests/dist/test_dpo.py::test_adapters_off_is_the_precomputed_reference": 2,
    "tests/dist/test_reward.py::test_beside_other_axes": 0,
    "tests/dist/test_reward.py::test_metrics_are_those_without_an_axis_and_a_kill_goes_on_bitwise": 1,
    "tests/dist/test_tensor_files.py::test_a_run_goes_on_as_the_plain_process_would": 4,
    "tests/dist/test_tensor_files.py::test_an_export_is_that_of_one_process_to_the_bit": 3,
    "tests/dist/test_tensor_files.py::test_a_pipeline_goes_on_bitwise": 2,
    "tests/dist/test_tensor_compile.py::test_one_graph_a_block_and_no_break": 3,
    "tests/dist/test_tensor_compile.py::test_fused_kernels_too": 1,
    "tests/dist/test_compile.py::test_compiled_blocks_train_the_same": 1,
    "tests/dist/test_generate.py::test_further_layouts": 1,
    "tests/dist/test_offload.py::test_every_tier_gives_the_bits_of_none": 4,
    "tests/dist/test_zeropp.py::test_the_same_of_more_combinations": 6,
    "tests/dist/test_hard_cases.py::test_four_ranks_under_every_stage": 0,
    # families: one of a sort is in CI, all types in make families
    "tests/dist/test_families.py::test_every_sort_under_every_stage": 2,
    "tests/dist/test_families.py::test_an_export_is_read_by_transformers": 3,
    "tests/dist/test_families.py::test_stages_are_transformers_to_a_millionth": 3,
    "tests/dist/test_families.py::test_each_sort_of_files_goes_on_to_the_bit_and_is_read_again": 3,
    "tests/dist/test_families.py::test_experts_under_every_stage_however_recomputed": 2,
    "tests/dist/test_split_families.py::test_every_family_that_may_be_shared_is_right": 0,
    # what takes minutes by itself, or is walked by another
    "tests/e2e/test_command_line.py::test_a_run_whose_ranks_are_killed_twice_ends_as_the_straight_one": 1,
    "tests/unit/bench/test_gpu.py::test_the_bench_runs_and_goes_on": 0,
    "tests/e2e/test_notebook.py": 0,
    "tests/dist/test_kills.py::test_killed_at_any_moment": 0,
    "tests/dist/test_kills.py::test_killed_in_every_phase": 0,
    "tests/dist/test_zombies.py::test_a_rank_that_wakes_up_changes_nothing": 1,
    "tests/dist/test_zombies.py::test_a_disk_that_fills_up_costs_no_number": 0,
    "tests/unit/bench/test_peers.py": 0,
}
# make test-cpu runs all of these files, and CI has their slow tests from there alone, without wide vectors.
NARROW = ("tests/dist/test_stages.py", "tests/e2e/test_embedded.py")
# Of files that run a second time by CUDA's rules (--streams), what CI runs: what moves, overlaps or uses a thread. What
# refuses, counts or damages files has been seen already.
MOVES = {
    "tests/dist/test_offload.py": (
        "test_every_tier_gives_the_bits_of_none",
        "test_what_is_frozen_stays_and_what_is_unused_decays",
        "test_a_checkpoint_knows_no_tier",
        "test_the_gather_of_the_first_unit_waits_for_no_other",
        "test_inputs_of_blocks_come_back_as_they_were",
    ),
    "tests/dist/test_offload_axes.py": ("test_every_tier_gives_the_bits_of_none",),
    "tests/dist/test_experts.py": ("test_stages_are_transformers_to_a_millionth",),
    "tests/dist/test_experts_lora.py": (
        "test_on_four_bits_they_are_peft_on_the_rounded_base",
        "test_bytes_arrive_where_copies_know_only_one_nan",
    ),
    "tests/dist/test_qlora.py": (
        "test_bytes_arrive_where_copies_know_only_one_nan",
        "test_planted_gathered_as_numbers_they_do_not",
        "test_under_bf16_it_keeps_and_sends_what_is_predicted",
    ),
    "tests/dist/test_generate.py": ("test_training_does_not_notice",),
    "tests/dist/test_lora.py": (
        "test_every_stage_is_peft_to_a_millionth",
        "test_a_bf16_base_keeps_and_sends_what_is_predicted",
    ),
    "tests/dist/test_dpo.py": (
        "test_the_first_loss_is_ln_2_and_metrics_are_trls",
        "test_adapters_off_is_the_precomputed_reference",
    ),
    "tests/dist/test_zeropp.py": (
        "test_exact_bytes_and_near_numbers_through_the_whole_of_train",
        "test_resume_is_bitwise_with_every_switch",
        "test_one_rank_a_node_takes_one_hop_across",
    ),
    "tests/dist/test_resume.py": (
        "test_the_same_world_continues_bitwise",
        "test_preempted_in_mid_step_then_continued_bitwise",
    ),
}


def left_out(names: list[str], stay: int) -> list[str]:
    """Returns the names that make room for `stay` others, by a hash, which knows nothing of how cases are made."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[stay:]


class Tiers:
    """The plugin: it marks what only `make everything` runs; with `streams`, of tests that run by CUDA's rules."""

    def __init__(self, streams: bool = False) -> None:
        self.streams = streams

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items) -> None:
        cases = collections.defaultdict(dict)
        for item in items:
            path, _, name = item.nodeid.partition("[")[0].partition("::")
            if self.streams and path in MOVES and name not in MOVES[path]:
                item.add_marker(pytest.mark.everything)
            if item.get_closest_marker("slow"):
                test = f"{path}::{name}"
                cases[test if test in STAY else path][item.nodeid] = item
                if path in NARROW:
                    item.add_marker(pytest.mark.everything)
                    item.add_marker(pytest.mark.narrow)
        for name in cases.keys() & STAY.keys():
            for left in left_out(list(cases[name]), STAY[name]):
                cases[name][left].add_marker(pytest.mark.everything)
