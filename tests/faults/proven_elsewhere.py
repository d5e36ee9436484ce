"""Faults of the catalogue whose proof is not, or not only, a row of the table: number -> tests that have it."""

from __future__ import annotations

PROVEN_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "D2": (
        "tests/data/sources/test_records.py::test_last_line_cut_at_every_byte",
        "tests/data/sources/test_records.py::test_list_cut_at_every_byte",
        "tests/faults/test_catalogue.py::test_the_last_line_cut_at_every_byte_is_named_by_the_command",
    ),
    "D14": ("tests/methods/losses/test_sft.py::test_loss_and_gradients_equal_huggingface",),
    "D27": ("tests/data/sources/test_resolve.py::test_a_file_that_changes_in_between_is_refused",),
    "T1": ("tests/planning/test_tokenizer.py::test_llama_30_gets_a_reserved_token_and_never_the_exclamation_mark",),
    "T2": ("tests/data/test_audit.py::test_pad_may_be_a_stop_token",),
    "T3": ("tests/planning/test_tokenizer.py::test_llama_2_gets_unk_which_is_special_though_its_id_is_0",),
    "T5": ("tests/planning/test_tokenizer.py::test_a_spare_row_belongs_to_no_token",),
    "T9": ("tests/data/tokenize/test_encode.py::test_a_bos_that_the_template_writes_stands_once_and_can_be_refused",),
    "T10": ("tests/methods/losses/test_sft.py::test_loss_and_gradients_equal_huggingface",),
    "T12": ("tests/planning/test_tokenizer.py::test_a_turn_end_that_generation_config_forgets_is_said",),
    "M3": ("tests/training/test_checkpoint.py::test_any_damage_is_found_and_the_older_checkpoint_taken",),
    "M5": ("tests/models/test_load.py::test_weights_are_the_files_cast_to_the_planned_dtype",),
    "M6": (
        "tests/models/convert/test_rules.py::test_fused_matrices_go_there_and_back",
        "tests/commands/test_convert.py::test_every_family_goes_out_loads_and_comes_back",
        "tests/faults/test_catalogue.py::test_a_base_in_another_layout_trains_to_the_same_bits",
    ),
    "M7": (
        "tests/models/convert/test_rules.py::test_pieces_go_out_and_in_again",
        "tests/commands/test_convert.py::test_a_compiled_model_and_a_base_from_under_an_adapter_load",
        "tests/faults/test_catalogue.py::test_a_base_in_another_layout_trains_to_the_same_bits",
    ),
    "M12": ("tests/models/test_hub.py::test_refused",),
    "P4": (
        "tests/training/test_scaling.py::test_the_scale_stops_at_its_floor",
        "tests/training/test_step.py::test_an_fp16_overflow_is_the_scalers_business_until_the_floor",
    ),
    "P5": ("tests/training/test_step.py::test_a_non_finite_step_changes_neither_weights_nor_moments",),
    "P6": (
        "tests/training/test_loop.py::test_three_non_finite_steps_end_the_run_with_names_and_nothing_is_lost",
        "tests/report/test_rows.py::test_non_finite_is_null_and_named",
        "tests/report/test_results.py::test_a_non_finite_evaluation_is_null",
    ),
    "P7": (
        "tests/planning/test_attention.py::test_but_not_where_it_failed_the_check_here",
        "tests/planning/probes/test_attention.py::test_a_fault_that_needs_a_mask_tensor_is_looked_for_in_cudnn",
        "tests/planning/probes/test_cudnn.py::test_cudnn_is_found_out_where_its_gradients_are_not_finite",
    ),
    "P8": (
        "tests/planning/test_precision.py::test_the_override_below_torch_is_followed_or_refused",
        "tests/planning/test_environment.py::test_what_concerns_another_device_is_ignored",
    ),
    "R2": ("tests/faults/test_catalogue.py::test_a_device_that_fails_saves_nothing_of_its_step",),
    "R3": ("tests/commands/test_train.py::test_a_signal_saves_says_how_to_go_on_and_leaves_no_process",),
    "R4": ("tests/exactness/test_kill_and_resume.py::test_killed_and_resumed_equals_uninterrupted",),
    "R5": ("tests/exactness/test_kill_and_resume.py::test_a_kill_at_any_flush_of_a_save",),
    "R6": (
        "tests/faults/test_power_loss.py::test_nothing_wrong_is_loaded_after_a_power_failure",
        "tests/faults/test_power_loss.py::test_nothing_is_lost_whichever_operation_was_the_last",
    ),
    "R7": (
        "tests/training/test_checkpoint.py::test_a_full_disk_is_an_environment_fault_and_leaves_the_older_one",
        "tests/faults/test_each_operation.py::test_a_disk_that_fails_at_any_operation_is_exit_3_and_costs_nothing",
    ),
    "R8": (
        "tests/system/test_durable.py::test_staged_folder_on_a_failing_disk",
        "tests/faults/test_each_operation.py::test_a_disk_that_fails_at_any_operation_is_exit_3_and_costs_nothing",
    ),
    "R9": ("tests/faults/test_each_operation.py::test_a_disk_that_fails_at_any_operation_is_exit_3_and_costs_nothing",),
    "R12": ("tests/training/test_checkpoint.py::test_steps_are_ordered_as_numbers",),
    "R14": ("tests/commands/test_run_folder.py::test_a_folder_in_use_is_refused_until_its_process_ends",),
    "R18": (
        "tests/distributed/test_ranks.py::test_another_number_of_ranks_or_engine_goes_on_and_it_is_said",
        "tests/distributed/test_ranks.py::test_two_ranks_train_what_one_does",
    ),
    "R20": ("tests/exactness/test_kill_and_resume.py::test_killed_and_resumed_equals_uninterrupted",),
    "R22": ("tests/data/batching/test_loader.py::test_a_fault_is_raised_at_its_step",),
    "R23": ("tests/training/test_watchdog.py::test_a_rank_that_is_gone_or_silent_ends_the_run",),
    "R24": ("tests/training/test_watchdog.py::test_a_stall_names_who_is_behind",),
    "R25": (
        "tests/distributed/test_rank_faults.py::test_a_replica_that_differs_by_a_bit_is_noticed_at_the_next_comparison",
    ),
    "R27": ("tests/commands/test_train.py::test_a_signal_saves_says_how_to_go_on_and_leaves_no_process",),
    "K1": ("tests/faults/test_ppo_faults.py::test_k1_more_than_a_twentieth_without_a_score_ends_the_run_in_one_line",),
    "K2": ("tests/faults/test_ppo_faults.py::test_k2_a_rate_a_hundred_times_too_high_is_braked_and_ends_the_run",),
    "K3": ("tests/methods/losses/test_ppo_advantages.py::test_the_distance_is_never_negative_and_worked_out_by_hand",),
    "K4": ("tests/faults/test_ppo_faults.py::test_k4_a_model_that_only_stops_ends_the_run_in_one_line",),
    "K5": ("tests/faults/test_ppo_faults.py::test_k5_one_score_for_all_answers_makes_no_nan_and_ends_the_run",),
    "K7": ("tests/exactness/test_ppo_resume.py::test_killed_anywhere_and_resumed_equals_uninterrupted",),
    "E3": ("tests/runs/export/test_export.py::test_a_broken_merge_is_refused_and_leaves_nothing",),
    "E5": ("tests/commands/test_export.py::test_the_code_of_the_card_runs_in_a_fresh_process",),
}
