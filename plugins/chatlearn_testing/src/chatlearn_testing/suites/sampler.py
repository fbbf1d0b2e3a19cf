"""The contract of a sampler: an endless, reproducible stream of draws, which continues from its state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from chatlearn_core.data import Dataset, DatasetReport
from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import ExampleSampler, SamplerContext
from chatlearn_core.types import ExampleDraw, Prompt, RewardResult, Sample
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.json_state import damaged, spoil, stored
from chatlearn_testing.other_process import in_another_process
from chatlearn_testing.process_state import other_random_state
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_changes

SIZES = (3, 1, 8, 40, 5, 5, 13, 2)
"""Of the batches that most tests draw. Together they are several passes over the smaller datasets."""
GROUP_SIZE = 2
Drawn = list[tuple[str, int | str, str]]
"""(id of the example, number of the draw, seed key) of each draw."""


def make_dataset(name: str, size: int, weight: float = 1.0, first_token: int = 0) -> Dataset:
    """A dataset of ``size`` prompts of two tokens; ids are ``name/0``, ``name/1``, ..."""
    prompts = tuple(
        Prompt(f"{name}/{index}", np.array([first_token, index], dtype=np.int64), f"{name} {index}", data_source=name)
        for index in range(size)
    )
    return Dataset(name, weight, prompts, DatasetReport(name, f"{name}.jsonl", "plain", size, size, 0, 9, 2))


def make_datasets() -> tuple[Dataset, ...]:
    """Datasets of different sizes and weights; one has a single example."""
    return make_dataset("large", 23, 3.0), make_dataset("small", 7, 2.0), make_dataset("single", 1, 0.5)


class SamplerConformance(ConformanceSuite):
    """Contract tests that every sampler must pass.

    A subclass sets ``backend`` and ``options``, and says what is not true of the sampler: see ``settable``.
    """

    kind: ClassVar[Kind] = "sampler"
    settable: ClassVar[frozenset[str]] = ConformanceSuite.settable | {"reads_seed", "reads_weights", "draws_all"}
    reads_seed: ClassVar[bool] = True
    """False for a sampler whose order does not depend on the seed even if ``data.shuffle`` is true."""
    reads_weights: ClassVar[bool] = True
    """False for a sampler that does not draw from each dataset in proportion to its weight."""
    draws_all: ClassVar[bool] = True
    """False for a sampler that may leave out an example for more than a pass although it has seen no samples."""

    def test_is_a_sampler(self) -> None:
        """The object has the attributes of ``ExampleSampler``, with no state before the first batch that JSON cannot
        hold.
        """
        sampler = self._build()
        methods = ("next_batch", "observe", "state_dict", "load_state_dict")
        missing = [name for name in methods if not callable(getattr(sampler, name, None))]
        assert not missing, f"a method of chatlearn_core.protocols.ExampleSampler is missing: {', '.join(missing)}"
        assert isinstance(sampler.epochs, Mapping), f"epochs is {sampler.epochs!r}; it is a property that maps names"

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_a_batch_has_the_size_asked_for(self, shuffle: bool) -> None:
        """``next_batch(n)`` returns n draws of the datasets' own examples, for any n: the stream never ends."""
        examples = {id(example) for dataset in self._datasets() for example in dataset.examples}
        sampler = self._build(shuffle=shuffle)
        for size in (*SIZES, 200):
            batch = sampler.next_batch(size)
            assert len(batch) == size, f"next_batch({size}) returned {len(batch)} draws"
            wrong = [draw for draw in batch if not isinstance(draw, ExampleDraw)]
            assert not wrong, f"next_batch returns ExampleDraw, not {wrong[0]!r}"
            strange = [draw.example.id for draw in batch if id(draw.example) not in examples]
            assert not strange, f"{strange[0]!r} is not an example of the datasets, but a copy or another one"

    def test_one_dataset_is_enough(self) -> None:
        """A sampler works with one dataset, even with one example."""
        for size in (1, 5):
            sampler = self._build(datasets=(make_dataset("only", size),))
            drawn = [name for name, _, _ in _drawn(sampler, SIZES)]
            assert set(drawn) <= {f"only/{index}" for index in range(size)}
            assert len(drawn) == sum(SIZES)

    def test_draws_of_an_example_are_numbered_from_zero(self) -> None:
        """The first draw of each example has ``draw=0``, the next 1: ids of groups must be unique in a run."""
        found: dict[str, list[int | str]] = {}
        for name, draw, _ in _drawn(self._build(), SIZES):
            found.setdefault(name, []).append(draw)
        for name, draws in found.items():
            assert draws == list(range(len(draws))), f"the draws of {name!r} are numbered {draws}"

    def test_seed_keys_are_unique(self) -> None:
        """No two draws of a run have the same seed key: they would be sampled with the same random numbers."""
        keys = Counter(key for _, _, key in _drawn(self._build(), SIZES))
        repeated = [key for key, number in keys.items() if number > 1]
        assert not repeated, f"seed key {repeated[:1]} is used {keys.most_common(1)[0][1]} times"
        assert all(isinstance(key, str) and key for key in keys), "a seed key is a text that is not empty"

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_the_seed_determines_the_draws(self, shuffle: bool) -> None:
        """Samplers of the same seed draw the same, whatever the global random state is; and if the order depends on
        the seed, those of another seed draw another order if ``data.shuffle`` is true.
        """
        with other_random_state(1):
            first = _drawn(self._build(shuffle=shuffle), SIZES)
        with other_random_state(2):
            second = _drawn(self._build(shuffle=shuffle), SIZES)
        _assert_same(second, first, "draws with the same seed differ: take all randomness from SamplerContext.seed")
        if shuffle and self.reads_seed:
            others = [_drawn(self._build(seed=seed), SIZES) for seed in (1, 2)]
            orders = {tuple(name for name, _, _ in drawn) for drawn in (first, *others)}
            assert len(orders) == 3, "seeds 0, 1 and 2 give the same order; set reads_seed = False if that is meant"

    def test_another_process_draws_the_same(self) -> None:
        """A new process, with other hashes of strings, draws the same: a resumed run is one."""
        factory, options = self.record().factory, self.make_options()
        there = in_another_process(_draws_of, factory, options, limit_s=self.patience_s)
        here = _drawn(self._build(), SIZES)
        _assert_same(there, here, "another process draws otherwise: never iterate over a set, or hash a text")

    def test_samplers_share_nothing(self) -> None:
        """Two samplers, used in turns, draw as each would alone."""
        alone = [_drawn(self._build(seed=seed), SIZES) for seed in (0, 1)]
        samplers = [self._build(seed=seed) for seed in (0, 1)]
        drawn: list[Drawn] = [[], []]
        for size in SIZES:
            for sampler, one in zip(samplers, drawn, strict=True):
                one.extend(_drawn(sampler, [size]))
        for one, expected in zip(drawn, alone, strict=True):
            _assert_same(one, expected, "a sampler draws otherwise if another one is used between its batches")

    def test_epochs_counts_the_draws(self) -> None:
        """``epochs`` has every dataset's number of draws divided by its size, from 0; reading it changes nothing."""
        datasets, sampler, drawn = self._datasets(), self._build(), Counter[str]()
        for size in (0, *SIZES):
            if size:
                drawn.update(name.partition("/")[0] for name, _, _ in _drawn(sampler, [size]))
            found = dict(sampler.epochs)
            expected = {dataset.name: drawn[dataset.name] / len(dataset.examples) for dataset in datasets}
            assert found == pytest.approx(expected), f"after {drawn.total()} draws, epochs is {found}"

    def test_weights_are_shares(self) -> None:
        """A dataset's share of 440 draws is its share of the weights, within 5 points."""
        if not self.reads_weights:
            not_applicable("reads_weights is False: the sampler sets the shares itself")
        datasets, num_draws = self._datasets(), 440
        drawn = Counter(name.partition("/")[0] for name, _, _ in _drawn(self._build(), [11] * (num_draws // 11)))
        total = sum(dataset.weight for dataset in datasets)
        for dataset in datasets:
            share, wanted = drawn[dataset.name] / num_draws, dataset.weight / total
            assert abs(share - wanted) <= 0.05, f"{dataset.name!r} has {share:.2f} of the draws instead of {wanted:.2f}"

    def test_no_example_is_left_out(self) -> None:
        """By the end of its second pass over a dataset, the sampler has drawn each of its examples."""
        if not self.draws_all:
            not_applicable("draws_all is False: the sampler may leave examples out")
        for shuffle in (True, False):
            sampler = self._build(shuffle=shuffle)
            drawn: set[str] = set()
            while min(sampler.epochs.values()) < 2:
                assert len(drawn) < 10_000, "a dataset is never drawn from"
                drawn |= {name for name, _, _ in _drawn(sampler, [7])}
            missing = [e.id for dataset in self._datasets() for e in dataset.examples if e.id not in drawn]
            assert not missing, f"two passes did not draw {missing[:3]} (data.shuffle: {shuffle})"

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_a_restored_sampler_continues(self, shuffle: bool) -> None:
        """At any batch, ``state_dict`` written as JSON and loaded by a new sampler gives the draws that would have
        followed; also after samples were observed. The loading sampler may have drawn already.
        """
        whole = self._build(shuffle=shuffle)
        expected = [_step(whole, size) for size in SIZES]
        for stop in range(len(SIZES)):
            before = self._build(shuffle=shuffle)
            for size in SIZES[:stop]:
                _step(before, size)
            state = stored(before.state_dict())
            after = self._build(shuffle=shuffle)
            if stop % 2:
                _step(after, 3)
            after.load_state_dict(state)
            assert dict(after.epochs) == pytest.approx(dict(before.epochs)), "epochs differs after loading"
            for number, size in enumerate(SIZES[stop:], stop):
                _assert_same(_step(after, size), expected[number], f"loaded after batch {stop}, batch {number} differs")

    def test_the_state_is_a_copy(self) -> None:
        """``state_dict`` changes nothing, later batches do not change what it returned, and ``load_state_dict`` keeps
        no reference to what it was given.
        """
        expected = _stream(self._build())
        sampler, states = self._build(), []
        drawn: Drawn = []
        for size in SIZES:
            states.append((state := sampler.state_dict(), json.dumps(state)))
            drawn += _step(sampler, size)
        _assert_same(drawn, expected, "state_dict changed what the sampler draws")
        changed = [number for number, (state, text) in enumerate(states) if json.dumps(state) != text]
        assert not changed, "later batches changed a state that state_dict had returned: return a copy"
        state = json.loads(states[3][1])
        sampler.load_state_dict(state)
        spoil(state)
        tail = [draw for size in SIZES[3:] for draw in _step(sampler, size)]
        _assert_same(tail, expected[sum(SIZES[:3]) :], "load_state_dict keeps what it was given: copy it")

    @pytest.mark.parametrize("change", ["fewer examples", "other content", "another name", "one dataset less"])
    def test_a_state_of_other_data_is_refused(self, change: str) -> None:
        """``load_state_dict`` raises a ``CheckpointError`` that says what changed, and the sampler stays usable."""
        sampler = self._build()
        _step(sampler, 5)
        large, *others = self._datasets()
        other = {
            "fewer examples": (make_dataset("large", 22, large.weight), *others),
            "other content": (make_dataset("large", 23, large.weight, first_token=9), *others),
            "another name": (make_dataset("renamed", 23, large.weight), *others),
            "one dataset less": tuple(others),
        }[change]
        receiver = self._build(datasets=other)
        with pytest.raises(CheckpointError) as caught:
            receiver.load_state_dict(sampler.state_dict())
        assert str(caught.value).strip(), "the error is empty"
        fresh = self._build(datasets=other)
        message = "a state that was refused changed the sampler: check everything before the first assignment"
        _assert_same(_drawn(receiver, SIZES), _drawn(fresh, SIZES), message)

    def test_a_damaged_state_is_refused(self) -> None:
        """A state that lacks an entry, or has one of another type, is a ``CheckpointError`` or loads; never a
        ``KeyError``.
        """
        sampler = self._build()
        _step(sampler, 5)
        state = stored(sampler.state_dict())
        for number, one in enumerate(damaged(state)):
            try:
                self._build().load_state_dict(one)
            except CheckpointError:
                continue
            except Exception as error:
                raise AssertionError(
                    f"the damaged state {one} raises {error!r} instead of a CheckpointError"
                ) from error
            assert number, f"the empty state loads, but after a batch the state is {state}"

    def test_samples_are_read_only(self) -> None:
        """``observe`` takes samples without a reward and those excluded, and none at all, and changes none."""
        sampler = self._build()
        sampler.observe([])
        samples = _samples(sampler.next_batch(8))
        samples[0].reward, samples[1].exclusion = RewardResult(None, error="the reward failed"), "too long"
        samples[2].reward = None
        before = [_content(sample) for sample in samples]
        sampler.observe(tuple(samples))
        assert [_content(sample) for sample in samples] == before, "observe changed a sample"
        assert len(sampler.next_batch(4)) == 4

    def test_samples_may_come_late(self) -> None:
        """Asynchronous runs draw further batches before ``observe``, and drop some; draws stay numbered and unique."""
        sampler = self._build()
        waiting: list[list[Sample]] = []
        drawn: Drawn = []
        for number, size in enumerate(SIZES):
            batch = sampler.next_batch(size)
            drawn += _listed(batch)
            waiting.append(_samples(batch))
            if number >= 2 and number % 3:
                sampler.observe(waiting.pop(0))
        assert len({(name, draw) for name, draw, _ in drawn}) == len(drawn), "a draw of an example is repeated"
        assert len({key for _, _, key in drawn}) == len(drawn), "a seed key is repeated"

    def test_the_process_and_the_data_stay_as_they_were(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Drawing prints nothing, writes no file, and changes no seed, no other state of the process and no example."""
        datasets = self._datasets()
        content = [dataset.fingerprint for dataset in datasets]
        with nothing_changes(capfd):
            sampler = self._build(datasets=datasets)
            for size in SIZES:
                _step(sampler, size)
        assert [dataset.fingerprint for dataset in datasets] == content, "an example changed"

    # Internal methods

    _made: ClassVar[tuple[Dataset, ...]] = make_datasets()

    @classmethod
    def _datasets(cls) -> tuple[Dataset, ...]:
        return cls._made

    def _build(
        self, *, datasets: Sequence[Dataset] | None = None, seed: int = 0, shuffle: bool = True
    ) -> ExampleSampler:
        context = SamplerContext(self._datasets() if datasets is None else datasets, seed, shuffle)
        sampler: ExampleSampler = self.build()(self.make_options(), context)
        return sampler


def _listed(batch: Sequence[ExampleDraw]) -> Drawn:
    return [(draw.example.id, draw.draw, draw.seed_key) for draw in batch]


def _drawn(sampler: ExampleSampler, sizes: Sequence[int]) -> Drawn:
    """The draws of batches of these sizes."""
    return [draw for size in sizes for draw in _listed(sampler.next_batch(size))]


def _step(sampler: ExampleSampler, size: int) -> Drawn:
    """The draws of a batch, whose samples the sampler then observes."""
    batch = sampler.next_batch(size)
    sampler.observe(_samples(batch))
    return _listed(batch)


def _stream(sampler: ExampleSampler) -> Drawn:
    return [draw for size in SIZES for draw in _step(sampler, size)]


def _samples(batch: Sequence[ExampleDraw]) -> list[Sample]:
    """Scored samples of a batch. Most examples of even number are solved, others never or by half of the group."""
    samples = []
    for draw in batch:
        prompt = draw.example.prompt
        difficulty = int(prompt.token_ids[-1]) % 3
        for index in range(GROUP_SIZE):
            value = {0: 1.0, 1: 0.0, 2: float(index)}[difficulty]
            samples.append(
                Sample(
                    draw.sample_id(index),
                    draw.group_id,
                    prompt,
                    np.append(prompt.token_ids, [1, 2]),
                    np.array([False] * len(prompt.token_ids) + [True, True]),
                    reward=RewardResult(value),
                )
            )
    return samples


def _content(sample: Sample) -> tuple[object, ...]:
    arrays = (sample.token_ids.tobytes(), sample.loss_mask.tobytes())
    data = (sorted(sample.token_data), dict(sample.sequence_data))
    reward = None if sample.reward is None else replace(sample.reward)
    return (sample.id, sample.group_id, sample.example_id, *arrays, *data, reward, sample.exclusion)


def _assert_same(found: Drawn, expected: Drawn, message: str) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one == other, f"{message} (draw {number} is {one} instead of {other})"


def _draws_of(factory: str, options: Any) -> Drawn:
    """In another process: the draws of the sampler."""
    sampler = resolve_import_string(factory)(options, SamplerContext(make_datasets(), 0, True))
    return _drawn(sampler, SIZES)
