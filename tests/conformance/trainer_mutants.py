"""The template's trainer with one fault each, as an author might make it, and the contract test that must fail.

Names that mutants use and the template does not import are added by the test.
"""

from __future__ import annotations

from source_mutants import SourceMutant

PLAIN = "test_update_reports_the_loss_and_gradient_norm_of_a_plain_forward"
TEMPERATURE = "test_the_temperature_holds_for_every_output_and_the_loss"
ASKED = "test_outputs_are_those_asked_for"
TRACELESS = "test_compute_leaves_no_gradient"
STEP = "test_a_step_is_as_long_as_its_rate"
SEVERAL = "test_several_updates_are_resumed"
FAILED = "test_an_update_that_fails_leaves_no_gradients"
FRESH = "test_gradients_of_an_update_do_not_reach_the_next"
CLIPPED = "test_large_gradients_are_clipped_once_by_their_norm"
FINITE = "test_what_is_not_finite_on_its_own_is_refused"
AWAY = "test_offloaded_parts_are_not_worked_with"
RESUMED = "test_save_and_load_continue_bit_identically"
RANDOM = "test_random_state_is_resumed"
USED = "test_a_used_directory_holds_the_last_checkpoint"
OTHER = "test_a_checkpoint_of_another_model_is_refused"
EXPORT = "test_export_is_a_model_directory"
STREAM = "test_manifest_describes_the_stream"

ALONE = "test_the_work_of_a_trainer_leaves_the_process_as_it_was"
LEFT = "test_closing_a_trainer_leaves_nothing"
READ_ONLY = "test_a_batch_is_read_only"
DECLARED = "test_what_is_declared_is_there"

CLIP = "norm = self._clip(model)"
BACKWARD = "result.total.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it"
NOT_FINITE = "if not math.isfinite(total) or not math.isfinite(norm):"
OPTIMIZER_STEP = "self._optimizer.step()"
RATE_METRIC = '"lr": Metric(self.options.learning_rate)'
CLIP_BY_NORM = "torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.options.grad_clip, norm)"
SCHEDULE = (
    "self._n = getattr(self, '_n', 0) + 1; rate = self.options.learning_rate * {factor};"
    " self._optimizer.param_groups[0]['lr'] = rate; self._optimizer.step()"
)
STEP_TO_METRICS = f"""{OPTIMIZER_STEP}
        self._optimizer.zero_grad()
        own = {{
            "loss": Metric(total, 1.0, "sum"),
            "grad_norm": Metric(norm),
            {RATE_METRIC}"""
SAVE_START = "directory.mkdir(parents=True, exist_ok=True)"
READ_MODEL = 'model.load_state_dict(content["model"])'
READ_RANDOM = 'torch.set_rng_state(content["random"].cpu())'
OUTPUTS = "return {name: outputs[name] for name in request.names}"
TO_HOST = "return {name: tensor.cpu() for name, tensor in outputs.items()}"
COMPUTED = "outputs = self._outputs(model, batch.to(self.context.device), request)"
LOSS_OUTPUTS = "self._outputs(model, micro, loss.needs)"


def _edit(name: str, caught_by: str, old: str, new: str, equivalent: str = "") -> SourceMutant:
    return SourceMutant("trainer", name, "trainer.py", old, new, caught_by, equivalent=equivalent)


def _record(name: str, caught_by: str, old: str, new: str, equivalent: str = "") -> SourceMutant:
    return SourceMutant("trainer", name, "plugin.py", old, new, caught_by, equivalent=equivalent)


DROPPED = "self._optimizer.zero_grad()  # of the micro-batches before the failure"
MUTANTS = (
    # Numbers
    _edit("norm_after_clipping", PLAIN, "return float(norm)", "return min(float(norm), 0.01)"),
    _edit("entropy_at_temperature_1", TEMPERATURE, "scored.entropy)", "scored.entropy * request.temperature)"),
    _edit(
        "update_at_temperature_1",
        TEMPERATURE,
        LOSS_OUTPUTS,
        "self._outputs(model, micro, replace(loss.needs, temperature=1.0))",
    ),
    _edit(
        "update_at_half_the_temperature",
        TEMPERATURE,
        LOSS_OUTPUTS,
        "self._outputs(model, micro, replace(loss.needs, temperature=loss.needs.temperature ** 2))",
    ),
    _edit("all_outputs", ASKED, OUTPUTS, "outputs['extra'] = outputs['logprobs']; return outputs"),
    _edit("logprobs_always", ASKED, OUTPUTS, "return outputs"),
    _edit("double_outputs", ASKED, TO_HOST, TO_HOST.replace(".cpu()", ".double()")),
    _edit("half_outputs", ASKED, TO_HOST, TO_HOST.replace(".cpu()", ".half()")),
    _edit("outputs_with_a_graph", ASKED, TO_HOST, TO_HOST.replace(".cpu()", ".requires_grad_()")),
    # Gradients
    _edit(
        "compute_leaves_gradients",
        TRACELESS,
        COMPUTED,
        f"{COMPUTED}\n            for p in model.parameters():\n                p.grad = torch.ones_like(p)",
    ),
    _edit(
        "gradients_add_up",
        FRESH,
        "        self._optimizer.zero_grad()\n        own",
        "        own",
    ),
    _edit(
        "gradients_of_a_failed_update_stay",
        FAILED,
        DROPPED,
        "pass",
    ),
    _edit(
        "steps_with_the_gradients_before_a_failure",
        FAILED,
        DROPPED,
        "self._optimizer.step(); self._optimizer.zero_grad()",
    ),
    _edit(
        "errors_of_the_loss_are_swallowed",
        FAILED,
        f"{DROPPED}\n            raise",
        f"{DROPPED}\n            return {{}}",
    ),
    # Clipping
    _edit("never_clips", CLIPPED, CLIP_BY_NORM, "pass"),
    _edit(
        "clips_every_micro_batch",
        CLIPPED,
        BACKWARD,
        f"{BACKWARD}\n                torch.nn.utils.clip_grad_norm_(model.parameters(), self.options.grad_clip)",
    ),
    _edit(
        "clips_by_value",
        CLIPPED,
        CLIP_BY_NORM,
        "torch.nn.utils.clip_grad_value_(model.parameters(), self.options.grad_clip)",
    ),
    _edit(
        "clips_each_parameter",
        CLIPPED,
        CLIP_BY_NORM,
        "[torch.nn.utils.clip_grad_norm_([p], self.options.grad_clip) for p in model.parameters()]",
    ),
    _edit(
        "clips_to_the_square",
        CLIPPED,
        CLIP_BY_NORM,
        CLIP_BY_NORM.replace("self.options.grad_clip", "self.options.grad_clip**2"),
    ),
    _edit(
        "always_normalises",
        CLIPPED,
        CLIP_BY_NORM,
        "[p.grad.mul_(self.options.grad_clip / norm) for p in model.parameters()]",
    ),
    _edit(
        "norm_is_measured_and_not_clipped",
        CLIPPED,
        CLIP,
        "norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])",
    ),
    # Steps
    _edit("two_steps", STEP, OPTIMIZER_STEP, "self._optimizer.step(); self._optimizer.step()"),
    _edit("rate_ten_times", STEP, RATE_METRIC, RATE_METRIC.replace("learning_rate", "learning_rate * 10")),
    _edit("rate_of_one", STEP, RATE_METRIC, '"lr": Metric(1.0)'),
    _edit("rate_halved", STEP, "lr=self.options.learning_rate,", "lr=self.options.learning_rate / 2,"),
    _edit("rate_by_default", STEP, "lr=self.options.learning_rate, ", ""),
    _edit("warm_up_reports_the_peak", STEP, OPTIMIZER_STEP, SCHEDULE.format(factor="min(1, self._n / 4)")),
    _edit(
        "later_schedule_is_not_saved",
        SEVERAL,
        STEP_TO_METRICS,
        STEP_TO_METRICS.replace(OPTIMIZER_STEP, SCHEDULE.format(factor="(1 if self._n < 4 else 0.5)")).replace(
            RATE_METRIC, '"lr": Metric(rate)'
        ),
    ),
    # Refusals
    _edit("only_the_loss_is_checked", FINITE, NOT_FINITE, "if not math.isfinite(total):"),
    _edit("only_the_norm_is_checked", FINITE, NOT_FINITE, "if not math.isfinite(norm):"),
    _edit("only_nan_is_refused", FINITE, NOT_FINITE, "if math.isnan(total) or math.isnan(norm):"),
    _edit("nothing_is_refused", FINITE, NOT_FINITE, "if False:"),
    _edit(
        "refused_after_the_step",
        FINITE,
        NOT_FINITE,
        f"self._optimizer.step()\n        {NOT_FINITE}",
    ),
    _edit(
        "refused_gradients_stay",
        FINITE,
        "            self._optimizer.zero_grad()\n            raise",
        "            raise",
    ),
    _edit("refusal_names_nothing", FINITE, "{', '.join(batch.sample_ids[:16])}", "the batch"),
    _edit(
        "computes_without_weights",
        AWAY,
        'model = self._ready("weights")\n        with',
        "model = self._ready()\n        with",
    ),
    _edit(
        "updates_without_the_optimizer",
        AWAY,
        'self._ready("weights", "gradients", "optimizer")',
        'self._ready("weights", "gradients")',
    ),
    _edit(
        "updates_without_weights",
        AWAY,
        'self._ready("weights", "gradients", "optimizer")',
        'self._ready("gradients", "optimizer")',
    ),
    _edit(
        "streams_without_weights",
        AWAY,
        'self._ready("weights").state_dict().items()',
        "self._ready().state_dict().items()",
    ),
    _edit("says_not_what_is_away", AWAY, "{', '.join(sorted(away))} is offloaded", "something is offloaded"),
    # Checkpoints
    _edit("random_state_is_not_restored", RANDOM, READ_RANDOM, "pass"),
    _edit("random_state_is_seeded", RANDOM, READ_RANDOM, "torch.manual_seed(0)"),
    _edit(
        "random_state_of_the_start",
        RANDOM,
        '"random": torch.get_rng_state()',
        '"random": torch.Generator().get_state()',
    ),
    _edit(
        "first_save_stays",
        USED,
        SAVE_START + "\n        optimizer",
        "if (directory / CHECKPOINT_FILE).exists():\n            return file_facts(directory, [CHECKPOINT_FILE])\n"
        f"        {SAVE_START}\n        optimizer",
    ),
    _edit(
        "used_directory_is_refused",
        USED,
        SAVE_START + "\n        optimizer",
        "directory.mkdir(parents=True)\n        optimizer",
    ),
    _edit(
        "taken_as_far_as_it_fits",
        OTHER,
        READ_MODEL,
        "own = model.state_dict(); model.load_state_dict({n: content['model'].get(n, t) if"
        " content['model'].get(n, t).shape == t.shape else t for n, t in own.items()})",
    ),
    _edit(
        "another_model_replaces_its_own",
        OTHER,
        READ_MODEL,
        "self._model = BigramModel(len(content['model']['unigram.bias']));"
        " self._model.load_state_dict(content['model'])",
    ),
    _edit(
        "another_model_is_a_torch_error",
        OTHER,
        "(OSError, EOFError, RuntimeError, KeyError",
        "(OSError, EOFError, KeyError",
    ),
    _edit(
        "moments_are_not_read",
        RESUMED,
        'self._optimizer.load_state_dict(content["optimizer"])',
        "pass",
    ),
    _edit("weights_are_not_read", RESUMED, READ_MODEL, "pass"),
    # The process, the batch, the promises
    _edit("update_seeds", ALONE, OPTIMIZER_STEP, "torch.manual_seed(0); random.seed(0); self._optimizer.step()"),
    _edit(
        "update_seeds_torch", ALONE, OPTIMIZER_STEP, "torch.manual_seed(len(batch.sample_ids)); self._optimizer.step()"
    ),
    _edit("compute_seeds_torch", ALONE, COMPUTED, f"torch.manual_seed(0); {COMPUTED}"),
    _edit("load_seeds_numpy", ALONE, READ_MODEL, f"np.random.seed(0); {READ_MODEL}"),
    _edit(
        "save_seeds_python",
        ALONE,
        SAVE_START + "\n        optimizer",
        f"random.seed(1); {SAVE_START}\n        optimizer",
    ),
    _edit(
        "thread_after_close",
        LEFT,
        "        self._model = None\n        self._optimizer = None\n\n    @property",
        "        self._model = None\n        self._optimizer = None\n"
        "        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n\n    @property",
    ),
    _edit("variable_left", ALONE, OPTIMIZER_STEP, "os.environ['ACME_RANK'] = '0'; self._optimizer.step()"),
    _edit(
        "file_left",
        ALONE,
        OPTIMIZER_STEP,
        "Path('/tmp', f'acme-{os.getpid()}').write_text('x'); self._optimizer.step()",
    ),
    _edit("deterministic", ALONE, OPTIMIZER_STEP, "torch.use_deterministic_algorithms(True); self._optimizer.step()"),
    _edit("default_dtype", ALONE, OPTIMIZER_STEP, "torch.set_default_dtype(torch.float64); self._optimizer.step()"),
    _edit(
        "directory_changed",
        ALONE,
        SAVE_START + "\n        optimizer",
        f"{SAVE_START}; os.chdir(directory)\n        optimizer",
    ),
    _edit(
        "batch_changed",
        READ_ONLY,
        "        total, parts = 0.0, []\n",
        "        total, parts = 0.0, []\n        batch.token_data['advantages'].add_(0)\n"
        "        batch.loss_mask[batch.cu_seqlens[1:].long() - 1] = False\n",
    ),
    _edit(
        "batch_data_changed",
        READ_ONLY,
        COMPUTED,
        f"{COMPUTED}; [v.mul_(0.5) for v in batch.token_data.values() if v.is_floating_point()]",
    ),
    _edit(
        "batch_data_added",
        READ_ONLY,
        COMPUTED,
        f"{COMPUTED}; batch.token_data['old_logprobs'] = outputs[min(outputs)]",
    ),
    _edit(
        "batch_entry_cloned",
        READ_ONLY,
        COMPUTED,
        f"{COMPUTED}; batch.token_data.update({{n: v.clone() for n, v in batch.token_data.items()}})",
        "an equal tensor in place of another is the same batch",
    ),
    _edit(
        "stray_file_in_checkpoint",
        RESUMED,
        SAVE_START + "\n        optimizer",
        f"{SAVE_START}; (directory / 'notes.txt').write_text('x')\n        optimizer",
        "a checkpoint's folder belongs to the trainer, which may write what it likes there",
    ),
    _edit(
        "engine_arguments_ignored",
        "test_unknown_engine_arguments_are_refused",
        "if context.engine_arguments:",
        "if False:",
    ),
    _edit(
        "engine_arguments_unnamed",
        "test_unknown_engine_arguments_are_refused",
        "{', '.join(sorted(context.engine_arguments))}",
        "all of them",
    ),
    _record("declares_any_ranks", "test_declared_ranks_work", "max_ranks=1", "max_ranks=None"),
    _record("declares_two_ranks", "test_declared_ranks_work", "max_ranks=1", "max_ranks=2"),
    _record("declares_reshards", DECLARED, "max_ranks=1", "max_ranks=1, reshards=True"),
    _record("declares_dimensions", DECLARED, "max_ranks=1", "max_ranks=1, parallel={'tp': 'tensor_parallel'}"),
    _record("declares_an_option", DECLARED, "max_ranks=1", "max_ranks=1, layout_options=('shards',)"),
    _record("declares_adapters", DECLARED, "max_ranks=1", "max_ranks=1, payloads=frozenset({'full', 'adapter'})"),
    _record(
        "declares_boxes",
        "test_boxes_cover_every_tensor_once",
        'exports=frozenset({"full_tensors"})',
        'exports=frozenset({"full_tensors", "boxes"})',
        "the only rank holds every tensor whole, so its boxes are the whole tensors",
    ),
    _record(
        "declares_values",
        "test_outputs_do_not_depend_on_packing",
        'heads=frozenset({"lm"})',
        'heads=frozenset({"lm", "value"})',
    ),
    _record(
        "declares_channels",
        "test_weights_of_another_trainer_are_taken",
        "max_ranks=1",
        "max_ranks=1, channels=frozenset({'tensors'})",
    ),
    # Weights
    _edit(
        "export_without_configuration",
        EXPORT,
        'save_model(self._ready("weights"), directory)',
        'save_model(self._ready("weights"), directory); (directory / "config.json").unlink()',
    ),
    _edit(
        "export_with_an_empty_configuration",
        EXPORT,
        'save_model(self._ready("weights"), directory)',
        'save_model(self._ready("weights"), directory); (directory / "config.json").write_text("{}")',
    ),
    _edit("owned_by_rank_1", STREAM, "for size in shape), 0, tensor", "for size in shape), 1, tensor"),
)
