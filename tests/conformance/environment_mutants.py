"""The template's environment with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

IS_ENVIRONMENT = "test_is_an_environment"
AS_EXPECTED = "test_cases_end_as_expected"
ORDERED = "test_a_rollout_is_the_one_that_was_ordered"
TOKENS = "test_tokens_are_those_that_were_sampled"
MASK = "test_the_loss_mask_covers_sampled_tokens"
HANDLES = "test_only_declared_handles_are_asked"
REPEATS = "test_a_rollout_repeats"
TOGETHER = "test_concurrent_rollouts_are_independent"
TURNS = "test_the_limit_of_turns_ends_it"
ROOM = "test_the_limit_of_tokens_ends_it"
LOST = "test_a_lost_generator_is_not_hidden"
CANCELLED = "test_a_cancelled_rollout_ends"
ODD = "test_odd_turns_do_no_harm"
AS_IT_WAS = "test_the_process_and_the_prompt_stay_as_they_were"
NOTHING_LEFT = "test_closing_leaves_nothing"

ASK = "turn = await context.generate(sequence.token_ids)"
TAKE = "sequence.sampled(turn)"
START = "guesses = 0\n"
OBSERVE = "sequence.observed(answer)"
FINISHED = "return context.finished([sequence], status=status, reward=reward)"
VALUE = "value = 1.0 / guesses if found else self.options.missed"
SETUP = '"""Nothing to load."""'
CLOSE = '"""Nothing to release."""'
LIMIT = "if context.turns_left == 0 or len(sequence.token_ids) + len(answer) >= context.max_tokens:"
READ = "return int(numbers[-1]) if numbers else None"
ENCODED = "np.array(context.tokenizer.encode(turn.text, add_special_tokens=False))"


def _environment(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return SourceMutant("environment", name, "environment.py", old, new, caught_by)


def _before(line: str, statement: str) -> str:
    return f"{statement}\n            {line}"


MUTANTS = (
    _environment("no_close", IS_ENVIRONMENT, "def close(", "def closed("),
    _environment("rollout_is_not_async", IS_ENVIRONMENT, "async def rollout", "def rollout"),
    _environment("one_guess_more", AS_EXPECTED, "guesses == self.options.max_guesses", "guesses > 4"),
    _environment("the_first_number", AS_EXPECTED, READ, READ.replace("-1", "0")),
    _environment("every_rollout_is_right", AS_EXPECTED, "found = guess == prompt.ground_truth", "found = True"),
    _environment("reward_is_an_int", AS_EXPECTED, VALUE, "value = int(found)"),
    _environment("no_reward", AS_EXPECTED, "reward=reward)", "reward=None)"),
    _environment("always_truncated", AS_EXPECTED, FINISHED, FINISHED.replace("=status", '="truncated"')),
    _environment(
        "id_of_the_prompt",
        ORDERED,
        FINISHED,
        FINISHED.replace("return ", "made = ") + "\n        made.id = prompt.id + 'x'\n        return made",
    ),
    _environment(
        "no_group",
        ORDERED,
        FINISHED,
        FINISHED.replace("return ", "made = ") + "\n        made.group_id = made.id\n        return made",
    ),
    _environment("no_sample", ORDERED, "finished([sequence]", "finished(["),
    _environment("two_samples_of_one_id", ORDERED, "finished([sequence]", "finished([sequence, sequence]"),
    _environment(
        "turns_are_encoded_again",
        TOKENS,
        TAKE,
        f"sequence.sampled(replace(turn, token_ids={ENCODED}, logprobs=turn.logprobs[:-1]))",
    ),
    _environment(
        "the_last_token_is_dropped",
        TOKENS,
        TAKE,
        "sequence.sampled(replace(turn, token_ids=turn.token_ids[:-1], logprobs=turn.logprobs[:-1]))",
    ),
    _environment("logprobs_are_zero", TOKENS, TAKE, "sequence.sampled(replace(turn, logprobs=turn.logprobs * 0))"),
    _environment(
        "asked_without_the_hint",
        TOKENS,
        ASK,
        "turn = await context.generate(sequence.token_ids[: len(prompt.token_ids)])",
    ),
    _environment(
        "asked_with_a_token_more", TOKENS, ASK, "turn = await context.generate(np.append(sequence.token_ids, 32))"
    ),
    _environment("a_new_prompt", TOKENS, ASK, ASK.replace("sequence.token_ids", "np.array([32, *sequence.token_ids])")),
    _environment(
        "the_hint_is_trained_on",
        MASK,
        FINISHED,
        "sequence.sample.loss_mask[len(prompt.token_ids):] = True\n        " + FINISHED,
    ),
    _environment(
        "the_first_turn_is_not_trained_on",
        MASK,
        FINISHED,
        "sequence.sample.loss_mask[: sequence.sample.turns[0].stop] = False\n        " + FINISHED,
    ),
    _environment("another_handle", HANDLES, ASK, ASK.replace("token_ids)", "token_ids, role='judge')")),
    _environment(
        "longer_turns",
        HANDLES,
        ASK,
        ASK.replace("token_ids)", "token_ids, sampling=replace(context.sampling, max_tokens=2000))"),
    ),
    _environment("random_reward", REPEATS, 'components={"accuracy"', 'components={"luck": random.random(), "accuracy"'),
    _environment("random_hint", REPEATS, OBSERVE, "sequence.observed(random.sample(list(answer), len(answer)))"),
    _environment(
        "counts_rollouts",
        REPEATS,
        'components={"accuracy"',
        'components={"number": float(id(context) % 9973), "accuracy"',
    ),
    _environment(
        "guesses_are_shared",
        TOGETHER,
        "guesses += 1",
        "self.guesses = getattr(self, 'guesses', {})\n"
        "            self.guesses[guesses] = turn.text\n"
        "            await asyncio.sleep(0)\n"
        "            turn = replace(turn, text=self.guesses[guesses])\n"
        "            guesses += 1",
    ),
    _environment(
        "the_sequence_is_shared",
        TOGETHER,
        TAKE,
        "self.last = turn\n            await asyncio.sleep(0)\n            sequence.sampled(self.last)",
    ),
    _environment("no_limit_of_turns", TURNS, LIMIT, LIMIT.replace("context.turns_left == 0 or ", "")),
    _environment("finished_at_the_limit", TURNS, 'status = "truncated"', 'status = "finished"'),
    _environment("one_turn_less", AS_EXPECTED, LIMIT, "if guesses == 2:"),
    _environment(
        "hints_beyond_the_limit",
        ROOM,
        LIMIT,
        "if context.turns_left == 0:\n                status = 'truncated'"
        "\n                break\n            if len(sequence.token_ids) + len(answer) >= context.max_tokens:\n"
        "                sequence.observed(answer)",
    ),
    _environment(
        "a_lost_turn_ends_it",
        LOST,
        ASK,
        "try:\n                turn = await context.generate(sequence.token_ids)\n"
        "            except Exception:\n"
        "                return context.finished([sequence], reward=RewardResult(0.0))",
    ),
    _environment(
        "cancellation_is_swallowed",
        CANCELLED,
        ASK,
        "try:\n                turn = await context.generate(sequence.token_ids)\n"
        "            except asyncio.CancelledError:\n"
        "                return context.finished([sequence], reward=RewardResult(0.0))",
    ),
    _environment(
        "broken_by_odd_text",
        ODD,
        TAKE,
        "self.broken = getattr(self, 'broken', False) or len(turn.text) > 200\n"
        "            assert not self.broken\n            sequence.sampled(turn)",
    ),
    _environment("seeds_are_global", AS_IT_WAS, TAKE, f"random.seed(0)\n            {TAKE}"),
    _environment("prints", AS_IT_WAS, TAKE, f"print(turn.text)\n            {TAKE}"),
    _environment("changes_the_prompt", AS_IT_WAS, TAKE, f"prompt.columns['guesses'] = guesses\n            {TAKE}"),
    _environment("changes_the_environment", AS_IT_WAS, SETUP, "os.environ['ACME'] = '1'"),
    _environment(
        "leaves_a_thread", NOTHING_LEFT, SETUP, "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    ),
    _environment("leaves_a_process", NOTHING_LEFT, SETUP, "self.child = subprocess.Popen(['sleep', '60'])"),
    _environment("leaves_a_file", NOTHING_LEFT, SETUP, "Path(tempfile.mkdtemp(), 'log').write_text('')"),
    _environment("closes_once", NOTHING_LEFT, CLOSE, "del self.options"),
)
