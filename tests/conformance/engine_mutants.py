"""First-party plugins on real engines with one fault each: edits of the sources of their packages."""

from __future__ import annotations

from functools import partial

from source_mutants import SourceMutant

_generator = partial(SourceMutant, "generator", package="chatlearn_transformers")
_trainer = partial(SourceMutant, "trainer", package="chatlearn_fsdp")

GREEDY = "test_greedy_equals_a_plain_forward"
BASIS = "test_logprobs_are_of_the_stated_basis"
MIXED = "test_draws_of_a_mixed_batch_follow_each_requests_distribution"
SEED = "test_the_seed_alone_decides"
KEPT = "test_kept_ids_are_what_a_token_was_sampled_from"
SCORED = "test_given_tokens_are_scored"
ENDS = "test_the_end_of_sequence_ends_a_completion"
SPANNING = "test_stop_strings_may_span_tokens"
RESUMED = "test_a_completion_resumes_after_any_token"
NEW_WEIGHTS = "test_new_weights_change_the_output"
LIVES_ON = "test_an_unfinished_request_lives_through_a_sync_as_declared"
CONTINUES = "test_save_and_load_continue_bit_identically"
PLAIN = "test_update_reports_the_loss_and_gradient_norm_of_a_plain_forward"

MUTANTS = (
    # The generator on transformers
    _generator(
        "numbers_of_the_next",
        "sampling.py",
        "np.uint64(1)) * _GOLDEN",
        "np.uint64(1)) * np.uint64(0)",
        SEED.replace("test_the_seed_alone_decides", "test_successive_tokens_are_drawn_independently"),
    ),
    _generator("seeds_of_16_bits", "sampling.py", "_MASK = (1 << 64) - 1", "_MASK = (1 << 16) - 1", SEED),
    _generator(
        "greedy_after_temperature",
        "sampling.py",
        "tempered = np.where(greedy, np.float32(1.0), temperature)",
        "tempered = np.where(greedy, np.float32(0.5), temperature)",
        BASIS,
        equivalent="the logprobs of a greedy row are taken from the raw logits, whatever its temperature",
    ),
    _generator(
        "second_of_two",
        "sampling.py",
        "token = raw.argmax(-1, keepdim=True)",
        "token = raw.topk(2).indices[:, -1:]",
        GREEDY,
    ),
    _generator(
        "top_k_one_less",
        "sampling.py",
        "lowest = ranked.gather(-1, top_k[:, None] - 1)",
        "lowest = ranked.gather(-1, (top_k[:, None] - 2).clamp(min=0))",
        KEPT,
    ),
    _generator(
        "top_p_without_the_crossing",
        "sampling.py",
        "last = inside.sum(-1, keepdim=True) - 1",
        "last = (inside.sum(-1, keepdim=True) - 2).clamp(min=0)",
        KEPT,
    ),
    _generator(
        "top_p_of_the_raw",
        "sampling.py",
        "cut = keep_top(scaled[plan.cut_rows],",
        "cut = keep_top(raw[plan.cut_rows],",
        BASIS,
    ),
    _generator(
        "normaliser_before_the_cut",
        "sampling.py",
        "scaled = scaled.index_copy(0, plan.cut_rows, cut)\n        normaliser = scaled.logsumexp(-1, keepdim=True)",
        "scaled = scaled.index_copy(0, plan.cut_rows, cut)",
        BASIS,
    ),
    _generator(
        "raw_is_processed",
        "sampling.py",
        "return Sampled(token.squeeze(-1), logprob, raw_logprob,",
        "return Sampled(token.squeeze(-1), logprob, logprob,",
        BASIS,
    ),
    _generator("half_logits", "sampling.py", "raw = logits.float()", "raw = logits.bfloat16().float()", GREEDY),
    _generator(
        "plan_of_the_old_composition",
        "scheduler.py",
        "if first == 0 and self._plan is not None:",
        "if self._plan is not None and len(self._running) == len(self._plan_of):",
        MIXED,
        also=(
            ("self._plan = None\n        self._observed = [", "self._observed = ["),
            (
                "        if first == 0:\n            self._plan = plan",
                "        self._plan, self._plan_of = plan, list(self._running)",
            ),
        ),
    ),
    _generator(
        "counts_from_zero",
        "scheduler.py",
        "slots.counts[rows] = [pending.num_prior for pending in admitted]",
        "slots.counts[rows] = [0 for pending in admitted]",
        RESUMED,
    ),
    _generator(
        "numbers_of_the_row",
        "scheduler.py",
        "uniforms(slots.seeds[first:stop], counts)",
        "uniforms(slots.seeds[first:stop], counts + rows)",
        "test_seeds_decide",
    ),
    _generator(
        "positions_one_off",
        "scheduler.py",
        "logits = self._decoder.decode(last, slots.lengths[:count])",
        "logits = self._decoder.decode(last, np.maximum(slots.lengths[:count] - 1, 0))",
        GREEDY,
    ),
    _generator(
        "last_row_is_not_moved",
        "scheduler.py",
        "            slots.move(source_rows, target_rows)\n",
        "            slots.move(source_rows[:-1], target_rows[:-1])\n",
        "test_equal_ids_get_their_own_completions",
    ),
    _generator(
        "cache_rows_are_not_moved",
        "scheduler.py",
        "            if self._kv_valid:\n                self._decoder.move_rows",
        "            if False:\n                self._decoder.move_rows",
        "test_max_tokens_bounds_a_completion",
    ),
    _generator(
        "eos_of_the_first_row",
        "scheduler.py",
        "stopped = self._is_eos[tokens] & slots.stops_at_eos[first:stop]",
        "stopped = self._is_eos[tokens] & slots.stops_at_eos[0]",
        ENDS,
    ),
    _generator(
        "eos_is_ignored",
        "scheduler.py",
        "slots.stops_at_eos[rows] = [not params.ignore_eos for params in sampling]",
        "slots.stops_at_eos[rows] = False",
        ENDS,
    ),
    _generator(
        "first_stop_token_only",
        "scheduler.py",
        "stopped |= (slots.stop_ids[first:stop] == tokens[:, None]).any(axis=1)",
        "stopped |= slots.stop_ids[first:stop][:, 0] == tokens",
        "test_stop_tokens_end_a_completion",
    ),
    _generator("stop_strings_within_a_token", "stopping.py", "seen = self._tail + added", "seen = added", SPANNING),
    _generator(
        "window_is_lost",
        "stopping.py",
        'self._tail = seen[-(self._longest - 1) :] if self._longest > 1 else ""',
        'self._tail = ""',
        SPANNING,
    ),
    _generator(
        "prior_is_not_watched",
        "scheduler.py",
        "pending.watcher.feed(token_id)\n            self._waiting",
        "pass\n            self._waiting",
        "test_a_resumed_completion_stops_as_a_whole",
    ),
    _generator(
        "versions_are_not_split",
        "scheduler.py",
        "                pending.spans.append((int(self._slots.counts[row]), version))",
        "                pending.spans[0] = (pending.spans[0][0], version)",
        "test_a_sync_while_sampling_is_stated_token_by_token",
    ),
    _generator(
        "cache_survives_the_sync",
        "generator.py",
        'recompute=self._options.kv_after_sync == "recomputed")',
        "recompute=False)",
        LIVES_ON,
    ),
    _generator(
        "shared_prefix_of_any_prompt",
        "scheduler.py",
        "                key = context.tobytes()\n                known",
        "                key = context[:1].tobytes() + bytes([len(context)])\n                known",
        GREEDY,
    ),
    _generator(
        "steps_while_paused",
        "generator.py",
        'if self._paused or self._state != "serving" or not self._collect():',
        'if self._state != "serving" or not self._collect():',
        "test_a_paused_request_goes_on_later",
    ),
    _generator(
        "forward_on_the_loop",
        "generator.py",
        "report = await self.in_worker(self._step)",
        "report = self._step()",
        "test_the_event_loop_stays_free",
        equivalent="a step of the suite's tiny model is too short to keep an event loop; a large one shows it",
    ),
    _generator(
        "dropped_requests_go_on",
        "generator.py",
        "        self._dropped.add(pending)",
        "        pass",
        "test_a_timeout_ends_the_work",
        equivalent="no caller receives its tokens, and its slot is free at max_tokens: only speed shows it",
    ),
    _generator(
        "scores_of_the_prompt",
        "generator.py",
        "len(request.prompt_ids) - 1).float()",
        "len(request.prompt_ids) - 1).float().roll(1, 0)",
        SCORED,
    ),
    _generator(
        "scores_at_temperature_1", "generator.py", "scaled = logits / temperature", "scaled = logits / 1.0", SCORED
    ),
    _generator(
        "offload_forgets_buffers",
        "offload.py",
        "for tensor in (*self._model.parameters(), *self._model.buffers()):\n            self._held",
        "for tensor in self._model.parameters():\n            self._held",
        "test_an_offloaded_generator_occupies_nothing",
    ),
    _generator(
        "onload_halves",
        "offload.py",
        "tensor.data = data.to(device)",
        "tensor.data = data.bfloat16().to(data.dtype).to(device)",
        "test_an_offloaded_generator_occupies_nothing",
    ),
    _generator(
        "boxes_at_the_start",
        "weight_loader.py",
        "self._views[shard.name][slices(shard.box)].copy_(shard.tensor)",
        "self._views[shard.name][tuple(slice(0, n) for n in shard.tensor.shape)].copy_(shard.tensor)",
        NEW_WEIGHTS,
    ),
    _generator(
        "worker_stays",
        "generator.py",
        "            self._worker.shutdown(wait=True, cancel_futures=True)\n",
        "",
        "test_closing_leaves_nothing",
        equivalent="an executor ends its thread when nothing refers to it any more",
    ),
    _generator(
        "engine_arguments_are_dropped",
        "generator.py",
        "check_engine_arguments(context.role, context.engine_arguments)",
        "{}",
        "test_unknown_engine_arguments_are_refused",
    ),
    _generator(
        "declares_an_interpreter",
        "plugin.py",
        "seeded=True,",
        "seeded=True, own_interpreter=True,",
        "test_what_is_declared_is_there",
    ),
    # The trainer on FSDP
    _trainer(
        "seeded_updates",
        "trainer.py",
        "        set_learning_rate(optimizer, rate)\n",
        "        set_learning_rate(optimizer, rate)\n        torch.manual_seed(0)\n",
        "test_the_work_of_a_trainer_leaves_the_process_as_it_was",
    ),
    _trainer(
        "clips_to_half",
        "trainer.py",
        "self._trainable(model), self.options.grad_clip, norm)",
        "self._trainable(model), self.options.grad_clip / 2, norm)",
        "test_large_gradients_are_clipped_once_by_their_norm",
    ),
    _trainer(
        "never_clips",
        "trainer.py",
        "if self.options.grad_clip is not None:",
        "if False:",
        "test_large_gradients_are_clipped_once_by_their_norm",
    ),
    _trainer(
        "rate_is_not_set",
        "trainer.py",
        "        set_learning_rate(optimizer, rate)\n",
        "",
        "test_a_step_is_as_long_as_its_rate",
    ),
    _trainer(
        "steps_twice",
        "trainer.py",
        "        optimizer.step()\n",
        "        optimizer.step()\n        optimizer.step()\n",
        "test_a_step_is_as_long_as_its_rate",
    ),
    _trainer(
        "gradients_stay",
        "trainer.py",
        "optimizer.zero_grad(set_to_none=True)",
        "pass",
        "test_gradients_of_an_update_do_not_reach_the_next",
    ),
    _trainer(
        "gradients_of_a_failure_stay",
        "trainer.py",
        "        model.zero_grad(set_to_none=True)",
        "        pass",
        "test_an_update_that_fails_leaves_no_gradients",
    ),
    _trainer(
        "norm_of_the_first",
        "trainer.py",
        "[p.grad for p in self._trainable(model) if p.grad is not None]))",
        "[p.grad for p in self._trainable(model) if p.grad is not None][:1]))",
        PLAIN,
    ),
    _trainer("half_the_loss", "trainer.py", "        total.backward()", "        (total / 2).backward()", PLAIN),
    _trainer(
        "count_is_not_saved",
        "checkpoint.py",
        '"updates": state.updates,',
        '"updates": min(1, state.updates),',
        "test_several_updates_are_resumed",
    ),
    _trainer(
        "count_is_not_read",
        "trainer.py",
        "        self._updates = state.updates\n",
        "",
        "test_several_updates_are_resumed",
    ),
    _trainer(
        "moments_are_not_read",
        "checkpoint.py",
        "            _copy_all(entry, live[name], file)\n    if state.ranks",
        "            pass\n    if state.ranks",
        CONTINUES,
    ),
    _trainer(
        "random_state_stays",
        "checkpoint.py",
        'set_random_state(content["random"], state.device, file)',
        "pass",
        "test_random_state_is_resumed",
    ),
    _trainer(
        "as_far_as_it_fits",
        "checkpoint.py",
        "if source.shape != tensor.shape:",
        "if source.dim() != tensor.dim():",
        "test_a_checkpoint_of_another_model_is_refused",
        equivalent="the record of the checkpoint is compared first, and refuses another vocabulary",
    ),
    _trainer(
        "moments_survive_load_model",
        "trainer.py",
        "            self._optimizer.state.clear()\n        draw",
        "            pass\n        draw",
        "test_a_model_is_loaded_in_place",
    ),
    _trainer(
        "decay_is_swapped",
        "trainer.py",
        "self._checkpoint_layout(), source, self.context, decay)",
        "self._checkpoint_layout(), source, self.context, decay and 1 - decay)",
        "test_models_are_averaged_as_they_are_loaded",
    ),
    _trainer(
        "loader_takes_no_share",
        "weight_loader.py",
        "blend(source, target, self._decay)",
        "blend(source, target, 0.0)",
        "test_weights_of_another_trainer_are_taken",
    ),
    _trainer(
        "boxes_start_at_zero",
        "weight_stream.py",
        "box = ((held.first, held.last), *full_box(held.shape[1:]))",
        "box = ((0, held.last - held.first), *full_box(held.shape[1:]))",
        "test_boxes_cover_every_tensor_once",
        equivalent="on one rank every box begins at the first row; the tests of several ranks belong to chatlearn-fsdp",
    ),
    _trainer(
        "works_when_frozen",
        "trainer.py",
        "if context.trainable:\n            self._optimizer",
        "if True:\n            self._optimizer",
        "test_a_reference_computes_without_learning",
    ),
    _trainer(
        "batch_is_changed",
        "trainer.py",
        "        for micro, rows in cut.on(self._device):\n",
        "        for micro, rows in cut.on(self._device):\n            micro.loss_mask[-1] = False\n",
        PLAIN,
    ),
    _trainer(
        "thread_stays",
        "trainer.py",
        "        self._optimizer = None\n        self._layout = None",
        "        threading.Thread(target=time.sleep, args=(30,),"
        " daemon=True).start()\n        self._optimizer = None\n        self._layout = None",
        "test_closing_a_trainer_leaves_nothing",
    ),
    _trainer(
        "adapters_are_not_made",
        "trainer.py",
        '        if payload == "adapter":\n            return adapter_manifest',
        '        if payload == "no adapter":\n            return adapter_manifest',
        "test_what_is_declared_is_there",
    ),
    _trainer(
        "engine_arguments_are_dropped",
        "trainer.py",
        "        check_engine_arguments(context.role, context.engine_arguments)\n",
        "",
        "test_unknown_engine_arguments_are_refused",
        equivalent="they are checked again when the model is read",
    ),
)
