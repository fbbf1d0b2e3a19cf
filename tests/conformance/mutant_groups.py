"""The class of a fault, told by the contract test that is meant for it; tables of the mutation run have these rows."""

from __future__ import annotations

from collections.abc import Mapping

NUMBERS = "numbers"
SEEDS = "seeds and draws"
STOPPING = "stopping and lengths"
INTERRUPTED = "abort, pause, resume"
VERSIONS = "policy versions"
MEMORY = "memory ownership and offload"
PROCESS = "process state and leftovers"
PROMISES = "promises of the record"
CHECKPOINTS = "checkpoints and state"
ERRORS = "errors and refusals"
CONCURRENT = "concurrency and cancellation"
FORM = "form and order of results"
TRANSPORT = "bits and completeness"

_TESTS: Mapping[str, str] = {
    NUMBERS: """
        test_near_ties_are_decided_as_asked test_greedy_equals_a_plain_forward test_logprobs_are_of_the_stated_basis
        test_given_tokens_are_scored test_kept_ids_are_what_a_token_was_sampled_from
        test_update_reports_the_loss_and_gradient_norm_of_a_plain_forward test_masked_tokens_teach_nothing
        test_the_temperature_holds_for_every_output_and_the_loss test_large_gradients_are_clipped_once_by_their_norm
        test_a_step_is_as_long_as_its_rate test_logprobs_equal_a_plain_forward test_entropy_equals_a_plain_forward
        test_compute_leaves_no_gradient test_gradients_of_an_update_do_not_reach_the_next test_updates_descend
        test_tokens_outside_the_mask_do_not_count test_gradients_are_those_of_the_loss test_micro_batches_add_up
        test_order_of_samples_does_not_matter test_an_empty_micro_batch_is_a_connected_zero
        test_compared_outputs_have_one_temperature test_advantages_follow_the_samples_not_their_order
        test_advantages_of_a_group_need_no_other_group test_odd_rewards_give_finite_advantages
        test_advantages_are_finite_and_fit_the_batch test_weights_are_shares test_epochs_counts_the_draws
        test_outputs_do_not_depend_on_micro_batches test_outputs_do_not_depend_on_packing
        test_update_does_not_depend_on_micro_batches test_cases_end_as_expected test_answers_are_those_of_the_cases
        test_every_process_learns_its_part test_facts_are_those_of_the_cases test_values_are_those_expected
        test_values_stay_within_the_bounds test_decisions_are_those_of_the_cases
        test_samples_of_the_cases_are_treated_as_expected test_the_order_of_samples_does_not_matter
        test_values_do_not_depend_on_packing test_values_are_as_expected test_outputs_are_those_of_the_role
        test_the_same_samples_get_the_same test_tokens_get_their_weights test_the_order_of_sequences_does_not_matter
        test_long_sequences_are_weighed test_weights_depend_on_the_mini_batch_alone
        test_names_and_numbers_of_groups_do_not_matter test_one_rank_gives_the_bits_of_the_local_runtime
        test_ranks_split_a_batch_and_merge_metrics_by_name
        test_without_staleness_a_run_is_sync test_the_first_step_is_that_of_sync
    """,
    SEEDS: """
        test_draws_of_a_mixed_batch_follow_each_requests_distribution test_successive_tokens_are_drawn_independently
        test_the_seed_alone_decides test_seeds_decide test_members_of_a_group_differ
        test_versions_do_not_change_the_draws test_the_seed_determines_the_draws test_another_process_draws_the_same
        test_seed_keys_are_unique test_draws_of_an_example_are_numbered_from_zero test_random_state_is_resumed
        test_sampling_leaves_the_process_as_it_was test_the_work_of_a_trainer_leaves_the_process_as_it_was
        test_samples_from_the_stated_distribution test_a_rollout_repeats test_another_process_reads_the_same
        test_another_process_decides_the_same test_the_same_questions_get_the_same_answers
        test_steps_train_on_the_draws_of_sync test_an_algorithm_that_asks_again_gets_more
    """,
    STOPPING: """
        test_stop_strings_may_span_tokens test_the_end_of_sequence_ends_a_completion
        test_stop_tokens_end_a_completion test_stop_strings_end_a_completion test_lengths_are_exact
        test_max_tokens_bounds_a_completion test_text_and_stop_strings_are_of_the_completion_alone
        test_a_batch_has_the_size_asked_for test_no_example_is_left_out test_wants_a_possible_number_of_examples
        test_the_limit_of_turns_ends_it test_the_limit_of_tokens_ends_it
    """,
    INTERRUPTED: """
        test_abort_keeps_the_tokens_so_far test_abort_ends_exactly_the_requests_named test_abort_of_all_ends_all
        test_abort_returns_what_was_sampled test_resume_continues_an_aborted_completion
        test_a_completion_resumes_after_any_token test_a_resumed_completion_stops_as_a_whole
        test_resumption_with_another_basis_is_refused test_a_paused_request_goes_on_later
        test_what_comes_while_paused_waits test_pause_and_resume_may_repeat test_a_timeout_names_the_request
        test_a_timeout_ends_the_work test_streaming_of_a_resumed_completion_begins_after_the_prior
        test_closing_ends_open_requests test_a_restored_sampler_continues test_samples_may_come_late
        test_pause_keeps_and_abort_returns_what_was_sampled test_a_call_that_hangs_ends_by_its_timeout
        test_a_request_that_takes_too_long_ends_by_its_timeout
        test_a_worker_with_a_blocked_event_loop_says_where
        test_a_dead_replica_is_reported_and_its_requests_start_again test_a_dead_replica_beyond_its_limit_is_refused
        test_a_lost_rank_is_rebuilt_and_goes_on_from_what_was_saved
    """,
    VERSIONS: """
        test_a_resumed_completion_keeps_its_versions test_a_sync_while_sampling_is_stated_token_by_token
        test_new_weights_change_the_output test_requests_held_over_a_failed_sync_fail test_a_sync_has_a_beginning
        test_a_loading_replica_serves_nothing test_reloading_the_same_weights_changes_nothing
        test_an_unfinished_request_lives_through_a_sync_as_declared test_weights_reach_every_replica
        test_every_token_is_of_the_weights_of_its_version
        test_a_trainer_follows_another test_weights_are_lent_to_a_replica_that_comes_late
    """,
    MEMORY: """
        test_tensors_that_were_given_are_not_kept test_tensors_may_be_views test_offloading_keeps_the_synced_weights
        test_an_offloaded_generator_refuses_work test_an_offloaded_generator_occupies_nothing
        test_offloaded_parts_are_not_worked_with test_offload_and_onload_change_nothing
        test_offloaded_parts_occupy_nothing test_what_was_sent_may_be_overwritten test_buckets_bound_the_memory
        test_bytes_are_counted test_streamed_tensors_outlive_the_step_of_the_stream test_the_row_is_read_only
        test_a_sample_is_read_only test_samples_are_read_only test_metrics_and_configuration_are_read_only
        test_losses_are_values test_advantages_change_nothing test_the_state_is_a_copy test_a_batch_is_read_only
        test_arguments_are_read_only test_the_environment_is_read_only test_conversations_are_read_only
        test_parts_are_moved_out_and_back test_values_are_got_by_sample_and_field
        test_a_question_is_read_only test_draws_are_independent test_samples_of_an_earlier_call_are_left_alone
    """,
    PROCESS: """
        test_the_process_stays_as_it_was test_closing_leaves_nothing test_closing_leaves_no_process
        test_nothing_is_left_behind test_an_open_sync_is_cleaned_up_by_close test_nothing_is_left
        test_the_process_and_the_data_stay_as_they_were test_samplers_share_nothing
        test_closing_a_trainer_leaves_nothing test_the_process_and_the_prompt_stay_as_they_were
        test_it_reads_the_given_variables_alone test_objects_share_nothing test_reading_is_lazy_and_closes_the_file
        test_files_are_left_as_they_are test_close_twice_leaves_nothing test_nothing_outlives_a_run
        test_a_role_that_does_not_start_closes_the_others
    """,
    PROMISES: """
        test_tokens_are_scored_or_refused test_a_model_that_samples_refuses_to_classify
        test_reach_is_what_the_record_says test_another_process_is_reached
        test_greedy_text_goes_on_after_many_requests test_declared_channels_are_taken
        test_declared_payloads_are_taken test_declared_payloads_are_carried test_declared_ranks_work
        test_what_is_declared_is_there test_unknown_engine_arguments_are_refused test_flow_names_its_roles
        test_declared_columns_are_those_of_its_rows test_is_a_format test_is_a_sampler test_is_a_reward
        test_is_a_logger test_is_a_generator test_is_a_trainer test_is_a_runtime test_the_plan_says_what_runs_together
        test_roles_are_told_when_they_are_up
        test_more_ranks_than_it_hosts_are_refused_before_start test_other_columns_reach_the_rewards
        test_expects_the_names_of_the_model_directory test_record_is_the_one_that_is_registered
        test_a_replica_that_missed_a_sync_takes_it_later test_is_an_environment test_only_declared_handles_are_asked
        test_is_a_source_of_tools test_it_is_recognised_as_declared test_cases_can_tell_right_from_wrong
        test_is_a_model_family test_every_declared_type_has_a_case test_no_option_is_required
        test_a_tokenizer_has_its_methods test_nothing_heavy_is_imported_before_a_run
        test_a_renderer_has_the_policy_it_was_made_with test_has_the_methods_of_its_protocol
        test_reads_only_what_it_declares test_options_are_described_and_strict test_no_other_command_has_the_name
        test_importing_it_imports_no_engine test_is_a_reader test_the_split_is_ignored_by_files
        test_the_bounds_are_those_of_the_values test_flows_that_ask_for_it_can_name_its_arguments
        test_the_record_is_consistent test_arguments_import_no_engine test_a_flow_can_make_the_call
        test_the_role_gets_the_tokens_that_are_declared test_is_a_kind_of_examples test_has_samples_is_true
        test_groups_matter_only_if_declared test_only_declared_fields_are_read
        test_the_plan_says_what_happens_when
        test_what_is_recorded_is_what_sync_samples test_recorded_rollouts_are_trained_on
    """,
    CHECKPOINTS: """
        test_several_updates_are_resumed test_a_used_directory_holds_the_last_checkpoint
        test_a_checkpoint_of_another_model_is_refused test_save_and_load_continue_bit_identically
        test_export_is_a_model_directory test_manifest_describes_the_stream test_state_comes_back
        test_content_tells_examples_apart test_examples_can_be_stored test_a_state_of_other_data_is_refused
        test_a_damaged_state_is_refused test_stream_and_export_follow_updates
        test_what_is_told_of_saved_files_is_true test_a_model_is_loaded_in_place
        test_models_are_averaged_as_they_are_loaded test_boxes_cover_every_tensor_once
        test_weights_of_another_trainer_are_taken test_manifest_has_the_names_of_the_model_directory
        test_a_restored_one_continues
        test_a_stopped_run_goes_on test_a_lost_trainer_is_survived test_what_is_in_flight_is_replaced_as_a_whole
    """,
    ERRORS: """
        test_errors_name_the_request test_errors_name_the_sample test_weights_that_were_not_announced_are_refused
        test_a_manifest_that_does_not_fit_is_refused test_what_is_not_finite_on_its_own_is_refused
        test_an_update_that_fails_leaves_no_gradients test_a_closed_reward_is_not_healthy
        test_a_loss_that_is_not_finite_is_refused test_odd_samples_are_marked_not_raised test_no_samples_no_results
        test_a_bad_row_is_an_error_with_a_reason test_unknown_options_are_refused
        test_unreadable_files_are_errors_that_name_them test_damaged_files_are_read_or_refused
        test_odd_rows_are_taken_or_refused test_an_error_of_the_role_is_not_hidden test_odd_values_are_refused
        test_missing_outputs_are_refused test_a_sample_without_tokens_is_passed_over
        test_odd_values_are_taken_or_refused test_missing_columns_are_taken_or_refused test_odd_metrics_are_taken
        test_a_failing_sender_reaches_the_receivers test_a_failing_loader_fails_its_replica_only
        test_a_silent_sender_is_a_timeout_that_names_it test_a_foreign_offer_is_refused
        test_closing_before_setup_is_allowed test_closing_twice_is_one_closing test_release_without_send_is_fine
        test_damaged_weights_are_loaded_as_they_are test_boxes_that_do_not_cover_a_tensor_once_are_refused
        test_one_dataset_is_enough test_closing_twice_is_fine test_a_reference_computes_without_learning
        test_a_lost_generator_is_not_hidden test_odd_turns_do_no_harm test_wrong_arguments_do_no_harm
        test_odd_arguments_do_no_harm test_closing_before_open_is_fine test_wrong_options_are_an_error_of_open
        test_other_environments_are_none_of_its_own test_a_missing_variable_is_named test_what_is_no_number_is_named
        test_ranks_out_of_range_are_refused test_a_broken_configuration_is_refused
        test_a_missing_directory_is_refused test_a_missing_tokenizer_is_refused
        test_a_tokenizer_of_another_model_is_refused test_an_empty_prompt_is_an_error_with_a_reason
        test_bad_options_are_refused test_missing_metrics_are_taken_or_refused test_odd_metrics_do_no_harm
        test_it_still_reacts_after_an_odd_step test_odd_samples_do_no_harm test_no_samples_no_verdicts
        test_one_failure_excludes_its_sample_alone test_what_ends_sync_ends_the_run test_closing_again_is_fine
    """,
    CONCURRENT: """
        test_calls_may_overlap test_a_cancelled_call_leaves_it_usable test_equal_ids_get_their_own_completions
        test_a_cancelled_request_leaves_the_others_alone test_a_slow_trainer_does_not_block_the_event_loop
        test_the_event_loop_stays_free test_cancellation_reaches_the_caller test_streaming_is_on_the_event_loop
        test_a_file_may_be_read_twice test_two_roles_do_not_mix test_when_samples_come_does_not_matter
        test_lists_of_every_kind_are_taken test_a_row_is_interpreted_by_itself
        test_a_cancelled_receiver_ends_as_cancelled test_concurrent_rollouts_are_independent
        test_a_cancelled_rollout_ends test_calls_at_once_are_independent test_a_cancelled_call_leaves_nothing
        test_a_second_source_is_independent
        test_a_cancelled_run_ends
    """,
    FORM: """
        test_one_result_a_sample_in_order test_a_sample_is_judged_by_itself test_a_verdict_is_of_the_whole_sample
        test_the_same_sample_gets_the_same_verdict test_outputs_are_those_asked_for test_metrics_are_parts
        test_rows_become_their_examples test_examples_are_well_formed test_components_are_those_of_the_cases
        test_outputs_are_zero_outside_the_loss_mask test_an_empty_batch_is_legal test_streaming_tells_a_prefix
        test_a_rollout_is_the_one_that_was_ordered test_tokens_are_those_that_were_sampled
        test_the_loss_mask_covers_sampled_tokens test_names_and_schemas_fit_chat_templates
        test_options_leave_the_key_kind_free test_the_same_call_answers_the_same test_a_cluster_has_one_head
        test_the_type_is_that_of_the_configuration test_the_configuration_can_be_stored
        test_facts_do_not_depend_on_what_was_read_before test_a_changed_directory_is_read_again
        test_every_token_is_in_the_vocabulary test_text_comes_back test_a_prompt_becomes_tokens_of_the_model
        test_prompts_are_independent test_verbatim_text_stays_as_it_is test_a_demonstration_continues_its_prompt
        test_a_demonstration_ends_as_a_completion_does test_control_tokens_are_what_the_policy_says
        test_the_system_prompt_comes_before_conversations test_a_text_that_is_too_long_is_refused_or_rendered
        test_a_conversation_needs_a_template test_values_are_finite_numbers test_a_value_depends_on_the_step_alone
        test_decisions_are_valid test_metrics_may_be_of_any_mapping test_verdicts_are_on_samples_that_it_was_given
        test_reasons_can_be_counted test_rewards_are_valid test_any_sequence_of_samples_is_taken
        test_weights_are_numbers_one_for_each_token test_the_name_and_the_help_are_well_formed
        test_help_explains_the_command test_options_are_explained test_narrow_terminals_and_plain_ones_are_served
        test_files_give_their_rows test_rows_are_mappings_or_located test_places_tell_rows_apart test_values_pass
        test_masked_is_true test_stores_what_is_declared_and_nothing_else
        test_data_are_named_after_the_role_or_the_argument test_rows_become_their_samples
        test_samples_are_those_of_the_draw test_samples_can_be_trained_on
        test_productions_are_whole
    """,
    TRANSPORT: """
        test_special_values_arrive_bit_for_bit test_every_tensor_arrives_bit_for_bit test_several_ranks_and_replicas
        test_a_stream_that_breaks_its_manifest_is_refused test_corrupted_files_are_refused
        test_each_sync_has_a_manifest_of_its_own test_several_syncs_in_a_row test_boxes_that_leave_a_gap_are_refused
        test_a_failed_sync_leaves_nothing_for_the_next test_tied_names_are_not_sent
        test_the_end_is_what_send_returns
    """,
}
GROUPS: Mapping[str, str] = {test: group for group, tests in _TESTS.items() for test in tests.split()}
"""Name of a contract test -> class."""
