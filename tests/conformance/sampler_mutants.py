"""The template's sampler with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

IS_SAMPLER = "test_is_a_sampler"
SIZE = "test_a_batch_has_the_size_asked_for"
ONE = "test_one_dataset_is_enough"
NUMBERED = "test_draws_of_an_example_are_numbered_from_zero"
KEYS = "test_seed_keys_are_unique"
SEED = "test_the_seed_determines_the_draws"
PROCESS = "test_another_process_draws_the_same"
NOTHING_SHARED = "test_samplers_share_nothing"
EPOCHS = "test_epochs_counts_the_draws"
WEIGHTS = "test_weights_are_shares"
NOT_LEFT_OUT = "test_no_example_is_left_out"
CONTINUES = "test_a_restored_sampler_continues"
COPY = "test_the_state_is_a_copy"
OTHER_DATA = "test_a_state_of_other_data_is_refused"
DAMAGED = "test_a_damaged_state_is_refused"
READ_ONLY = "test_samples_are_read_only"
LATE = "test_samples_may_come_late"
AS_IT_WAS = "test_the_process_and_the_data_stay_as_they_were"

BATCH = "batch = []"
COUNT = "self._draws[example.id] += 1"
DRAW = 'batch.append(ExampleDraw(example, number, f"{example.id}@{number}"))'
KEY = 'key = f"{self._seed}/{self._datasets[index].name}/{self._passes[index]}"'
QUEUE = "self._queues: list[deque[int]] = [deque() for _ in context.datasets]"
SHARES = "shares = [drawn / dataset.weight for dataset, drawn in zip(self._datasets, self._drawn, strict=True)]"
ORDER = "return [numbers[i] for i in generator.permutation(len(numbers))]"
RESTORE = "self._drawn, self._draws = drawn, draws"
RESTED = "self._passes, self._queues, self._rests = passes, queues, rests"
OTHER = "if data != self._data or not len(passes) == len(queues) == len(drawn) == len(data):"
DAMAGE = "except (AttributeError, KeyError, TypeError, ValueError) as error:"
GROUPS = "groups: dict[str, list[Sample]] = {}"
REWARDS = "rewards = [None if sample.reward is None else sample.reward.value for sample in group]"
OBSERVED = "for group in groups.values():"


def _sampler(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return SourceMutant("sampler", name, "sampler.py", old, new, caught_by)


MUTANTS = (
    _sampler("epochs_is_a_method", IS_SAMPLER, "    @property\n    def epochs", "    def epochs"),
    _sampler("no_observe", IS_SAMPLER, "def observe(", "def observed("),
    _sampler("the_data_ends", SIZE, BATCH, f"{BATCH}\n        size = min(size, 31)"),
    _sampler("one_draw_less", SIZE, "return batch", "return batch[:-1] if size > 100 else batch"),
    _sampler("copies_of_examples", SIZE, DRAW, DRAW.replace("(example,", "(replace(example),")),
    _sampler("pairs_of_values", SIZE, DRAW, DRAW.replace("ExampleDraw(", "(")),
    _sampler("two_datasets_are_needed", ONE, BATCH, f"{BATCH}\n        self._datasets[1]"),
    _sampler("more_examples_are_needed", ONE, BATCH, f"{BATCH}\n        self._datasets[0].examples[4]"),
    _sampler("numbers_from_one", NUMBERED, COUNT, f"{COUNT}\n            number += 1"),
    _sampler("numbers_of_the_pass", NUMBERED, COUNT, f"{COUNT}\n            number = self._passes[index]"),
    _sampler("numbers_are_text", NUMBERED, DRAW, DRAW.replace("example, number", "example, str(number)")),
    _sampler("the_key_is_the_example", KEYS, DRAW, "batch.append(ExampleDraw(example, number, example.id))"),
    _sampler("the_key_is_the_number", KEYS, DRAW, "batch.append(ExampleDraw(example, number, str(number)))"),
    _sampler("another_seed_is_nothing_new", SEED, KEY, KEY.replace("{self._seed}/", "")),
    _sampler("the_global_generator", SEED, ORDER, "random.shuffle(numbers)\n        return numbers"),
    _sampler("numpys_generator", SEED, ORDER, "return [numbers[i] for i in np.random.permutation(len(numbers))]"),
    _sampler("keys_of_the_clock", SEED, DRAW, DRAW.replace("@{number}", "@{number}/{time.time_ns()}")),
    _sampler("the_hash_of_a_text", PROCESS, KEY, f"{KEY}\n        key += str(hash(key))"),
    _sampler(
        "a_set_of_examples",
        PROCESS,
        "numbers: list[int]) -> list[int]:\n",
        "numbers: list[int]) -> list[int]:\n"
        '        numbers = [int(text) for text in {f"{number}" for number in numbers}]\n',
    ),
    _sampler("the_id_of_the_process", PROCESS, KEY, f"{KEY}\n        key += str(os.getpid())"),
    _sampler(
        "one_queue_for_all",
        NOTHING_SHARED,
        QUEUE,
        'self._queues = self.__class__.__dict__.get("queues") or '
        '[deque() for _ in context.datasets]; setattr(self.__class__, "queues", self._queues)',
    ),
    _sampler(
        "epochs_of_passes",
        EPOCHS,
        "dataset.name: drawn / len(dataset.examples)\n            for dataset, drawn in "
        "zip(self._datasets, self._drawn, strict=True)",
        "dataset.name: float(passes)\n            for dataset, "
        "passes in zip(self._datasets, self._passes, strict=True)",
    ),
    _sampler("whole_epochs", EPOCHS, "drawn / len(dataset.examples)", "float(drawn // len(dataset.examples))"),
    _sampler("epochs_resets", EPOCHS, "drawn / len(dataset.examples)", "drawn / len(dataset.examples) % 1"),
    _sampler("weights_are_ignored", WEIGHTS, SHARES, "shares = list(self._drawn)"),
    _sampler("weights_times_sizes", WEIGHTS, SHARES, SHARES.replace("dataset.weight", "len(dataset.examples)")),
    _sampler(
        "the_last_example_is_left_out",
        NOT_LEFT_OUT,
        "queue.extend(self._order(index, awake or list(range(len(examples)))))",
        "queue.extend(self._order(index, (awake[:-1] or awake) or list(range(len(examples)))))",
    ),
    _sampler(
        "draws_with_replacement",
        NOT_LEFT_OUT,
        ORDER,
        "return [numbers[i] for i in generator.integers(0, len(numbers), len(numbers))]",
    ),
    _sampler(
        "the_pass_starts_anew",
        CONTINUES,
        RESTED,
        "self._passes, self._rests = passes, rests\n        self._queues = [deque() for _ in passes]",
    ),
    _sampler("the_passes_start_anew", CONTINUES, RESTED, "self._queues, self._rests = queues, rests"),
    _sampler("rests_are_forgotten", CONTINUES, RESTED, "self._passes, self._queues = passes, queues"),
    _sampler("draws_are_forgotten", CONTINUES, RESTORE, "self._drawn = drawn"),
    _sampler("shares_are_forgotten", CONTINUES, RESTORE, "self._draws = draws"),
    _sampler("draws_are_added", CONTINUES, RESTORE, "self._drawn, self._draws = drawn, self._draws + draws"),
    _sampler("a_set_in_the_state", CONTINUES, '"passes": list(self._passes)', '"passes": set(self._passes)'),
    _sampler(
        "the_state_draws",
        COPY,
        'return {\n            "data"',
        'self.next_batch(1)\n        return {\n            "data"',
    ),
    _sampler("the_state_is_not_a_copy", COPY, '"drawn": list(self._drawn)', '"drawn": self._drawn'),
    _sampler("the_draws_are_not_a_copy", COPY, '"draws": dict(self._draws)', '"draws": self._draws'),
    _sampler(
        "the_loaded_state_is_kept", COPY, 'drawn = [int(number) for number in state["drawn"]]', 'drawn = state["drawn"]'
    ),
    _sampler(
        "other_data_is_taken", OTHER_DATA, OTHER, "if not len(passes) == len(queues) == len(drawn) == len(self._data):"
    ),
    _sampler("only_names_are_compared", OTHER_DATA, OTHER, "if [d[0] for d in data] != [d[0] for d in self._data]:"),
    _sampler("only_sizes_are_compared", OTHER_DATA, OTHER, "if [d[1] for d in data] != [d[1] for d in self._data]:"),
    _sampler("content_is_not_compared", OTHER_DATA, OTHER, "if [d[:2] for d in data] != [d[:2] for d in self._data]:"),
    _sampler(
        "a_raw_error",
        OTHER_DATA,
        'raise CheckpointError(\n                f"Sampler',
        'raise ValueError(\n                f"Sampler',
    ),
    _sampler(
        "half_a_state_is_loaded",
        OTHER_DATA,
        OTHER,
        f"self._passes, self._rests = passes[:1] * 9, rests\n        {OTHER}",
    ),
    _sampler("a_missing_entry", DAMAGED, DAMAGE, DAMAGE.replace("KeyError, ", "")),
    _sampler("a_wrong_type", DAMAGED, DAMAGE, DAMAGE.replace("TypeError, ", "")),
    _sampler("a_wrong_text", DAMAGED, DAMAGE, DAMAGE.replace(", ValueError", "")),
    _sampler(
        "an_empty_state_is_fine",
        DAMAGED,
        "try:\n            data,",
        "if not state:\n            return\n        try:\n            data,",
    ),
    _sampler("a_reward_is_expected", READ_ONLY, REWARDS, "rewards = [sample.reward.value for sample in group]"),
    _sampler("a_value_is_expected", READ_ONLY, "reward is not None and reward >=", "reward >="),
    _sampler("samples_are_expected", READ_ONLY, GROUPS, f"{GROUPS}\n        samples[0]"),
    _sampler(
        "solved_samples_are_excluded",
        READ_ONLY,
        OBSERVED,
        f"for sample in samples:\n            sample.exclusion = 'solved'\n        {OBSERVED}",
    ),
    _sampler("a_list_is_expected", READ_ONLY, GROUPS, f"{GROUPS}\n        samples.sort(key=lambda sample: sample.id)"),
    _sampler(
        "observed_in_order",
        LATE,
        OBSERVED,
        f"{OBSERVED}\n            self._draws[group[0].example_id] = int(group[0].group_id.rpartition('@')[2]) + 1",
    ),
    _sampler("seeds_everything", AS_IT_WAS, BATCH, f"{BATCH}\n        random.seed(self._seed)"),
    _sampler("prints", AS_IT_WAS, BATCH, f"{BATCH}\n        print(size)"),
    _sampler("writes_a_file", AS_IT_WAS, BATCH, f"{BATCH}\n        Path(tempfile.mkdtemp(), 'draws').write_text('')"),
    _sampler("changes_an_example", AS_IT_WAS, DRAW, f"{DRAW}\n            example.prompt.token_ids[0] = number"),
)
