"""The contract of a generator's promises: what the record declares is there, and the process around it stays usable."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ConfigError
from chatlearn_core.protocols import MemoryHandleLoader, ProcessGroupLoader
from chatlearn_core.types import Completion, TensorSpec, WeightManifest
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.loop_watch import least
from chatlearn_testing.model_directory import manifest_of
from chatlearn_testing.stress import MORE, stress_round
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.generator_fixtures import (
    FEW_TOKENS,
    LONG,
    NUM_TOKENS,
    PROMPTS,
    GeneratorFixtures,
    Replica,
    ask,
    idle,
    plain_greedy,
)

BLOCK_S = 0.09
"""Longest time for which a generator may keep the event loop from other work, seconds."""
MANY = 48
"""Requests at a time while the event loop is watched: what each of them blocks adds up."""
TIMEOUT_S = 0.2
"""Timeout of a request whose caller keeps the event loop for longer, seconds."""
LORA_RANK = 2


class PromisesContract(GeneratorFixtures, ConformanceSuite):
    """The part of ``GeneratorConformance`` about promises."""

    def test_unknown_engine_arguments_are_refused(self, model_directory: Path) -> None:
        """An engine argument that the engine does not have raises a ``ConfigError`` that names it, in the constructor
        or in ``setup``; one that is ignored is a typing error that nobody notices.
        """
        arguments = dict(self.engine_arguments) | {"no_such_argument": 1}
        with pytest.raises(ConfigError) as caught:
            self._set_up_and_close(model_directory, arguments)
        assert "no_such_argument" in str(caught.value), f"does not name the argument: {caught.value}"

    def test_what_is_declared_is_there(self, replica: Replica) -> None:
        """The loader has the methods of every declared channel, and a generator with ``own_interpreter`` the option
        ``python``, through which a run names the interpreter.
        """
        record, loader = self.record(), replica.generator.loader
        if "memory_handles" in record.channels:
            assert isinstance(loader, MemoryHandleLoader), "declares the channel 'memory_handles' without load_handles"
        if "process_group" in record.channels:
            assert isinstance(loader, ProcessGroupLoader), (
                "declares the channel 'process_group' without the methods of ProcessGroupLoader"
            )
            assert loader.num_group_ranks >= 1, f"num_group_ranks is {loader.num_group_ranks}"
            assert "tensors" in record.channels, "declares the channel 'process_group' without 'tensors'"
        assert record.adapter_channels <= record.channels, "adapter_channels has other channels than channels"
        if record.own_interpreter:
            assert "python" in self.options_model().model_fields, (
                "declares own_interpreter, but its options have no field 'python'"
            )

    def test_declared_payloads_are_taken(self, start: Callable[[], Replica], tensors: Mapping[str, Tensor]) -> None:
        """Payload ``adapter``: a sync of adapters that change nothing is taken, and the output stays the same.

        Options with an attribute ``payloads`` narrow what the record declares.
        """
        options = self.make_options(dtype="float32")
        if "adapter" not in getattr(options, "payloads", self.record().payloads):
            not_applicable("record and options do not declare the payload 'adapter'")
        if not {"tensors"} & (self.record().adapter_channels or self.record().channels):
            not_applicable("the record does not declare the channel 'tensors' for adapters")
        adapters, manifest = idle_adapters(tensors)
        replica = start()
        [before] = replica.ask(ask("before"))

        async def load() -> int:
            await replica.generator.loader.begin(1, manifest)
            await replica.generator.loader.load_tensors(iter(adapters.items()))
            return await replica.generator.loader.finish()

        assert replica.run(load()) == 1
        assert replica.ask(ask("after"))[0].token_ids.tolist() == before.token_ids.tolist()

    def test_the_event_loop_stays_free(self, replica: Replica) -> None:
        """While many requests are open, other coroutines run: rewards, other replicas, the gateway.

        Work of milliseconds per token belongs into a thread or into the engine's process.
        """
        requests = [ask(f"many-{number}", PROMPTS[number % len(PROMPTS)]) for number in range(MANY)]
        replica.ask(*requests)  # what only a first batch does

        def measure() -> float:
            with replica.loop.measuring() as blocks:
                replica.ask(*requests)
            return blocks().longest_s

        blocked_s = least(measure, BLOCK_S)
        assert blocked_s < BLOCK_S, f"the event loop stood still for {blocked_s:.2f} s under {MANY} requests"

    def test_sampling_leaves_the_process_as_it_was(
        self, synced: Replica, tensors: Mapping[str, Tensor], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Sampling and loading print nothing and leave the global random states alone: a trainer in the same process
        draws its dropout from them. A third-party engine (``requires`` of the record) may draw from torch's.
        """
        synced.ask(ask("first"))  # what only a first batch does
        capsys.readouterr()
        before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
        synced.ask(ask("greedy"), ask("drawn", temperature=1.0, seed=3), ask("cut", temperature=0.7, top_k=3, seed=4))
        if "tensors" in self.record().channels:
            synced.sync(tensors, synced.generator.policy_version + 1)
        after = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
        changed = [
            name for name, old, new in zip(("Python", "numpy", "torch"), before, after, strict=True) if old != new
        ]
        if self.record().requires:
            changed = [name for name in changed if name != "torch"]
        assert not changed, f"changed the random state of {', '.join(changed)}"
        printed = capsys.readouterr().out
        assert not printed, f"printed to standard output: {printed[:200]!r}"

    def test_streaming_is_on_the_event_loop(self, replica: Replica) -> None:
        """``on_tokens`` is called in the thread of the event loop, where callers may touch its objects."""
        self._require_streaming()
        found: set[int] = set()

        async def stream() -> int:
            await replica.generator.generate(ask("here"), lambda start, tokens: found.add(threading.get_ident()))
            return threading.get_ident()

        assert found == {replica.run(stream())}, "on_tokens was called in another thread than the event loop's"

    def test_streaming_of_a_resumed_completion_begins_after_the_prior(self, replica: Replica) -> None:
        """A resumed request tells only the tokens after those that it brings, from their position on."""
        self._require_streaming()
        if not self.record().resumable:
            not_applicable("the record does not declare 'resumable'")
        [part] = replica.ask(ask("part", max_tokens=5))
        told: list[tuple[int, int]] = []
        request = ask("rest", resume_from=part)
        completion = replica.run(
            replica.generator.generate(request, lambda start, tokens: told.extend(enumerate(tokens, start)))
        )
        expected = list(enumerate(completion.token_ids.tolist()))[len(part.token_ids) :]
        assert told == expected, f"after {len(part.token_ids)} tokens, on_tokens told of {told}"

    def test_a_timeout_ends_the_work(self, replica: Replica) -> None:
        """After its timeout a request is sampled no further: no token is told any more.

        Its callback keeps the event loop beyond the timeout, so that the timeout comes first, however fast the engine.
        """
        self._require_streaming()
        told: list[int] = []

        def on_tokens(start: int, tokens: list[int]) -> None:
            if not told:
                time.sleep(1.5 * TIMEOUT_S)
            told.extend(tokens)

        async def expire() -> int | Completion:
            try:
                return await replica.generator.generate(
                    ask("too-long", max_tokens=LONG, timeout_s=TIMEOUT_S), on_tokens
                )
            except BackendTimeoutError:
                count = len(told)
                await idle()
                return count

        found = replica.run(expire())
        if isinstance(found, Completion):
            assert len(found.token_ids) == LONG, "a request outlived its timeout"
            not_applicable("the engine completes a request within one turn of the event loop")
        assert len(told) == found, f"{len(told) - found} tokens were sampled after the timeout"
        assert replica.ask(ask("later"))[0].finish_reason == "length"

    def test_damaged_weights_are_loaded_as_they_are(
        self, start: Callable[[], Replica], tensors: Mapping[str, Tensor]
    ) -> None:
        """Weights with NaN make requests fail, or give logprobs that are not finite.

        Finite logprobs: the generator replaces NaN, and samples from a policy that the trainer does not have. A run
        refuses logprobs that are not finite, and so learns that the trainer diverged.
        """
        if "tensors" not in self.record().channels:
            not_applicable("the record does not declare the channel 'tensors'")
        replica = start()
        damaged = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in damaged.values():
            if tensor.is_floating_point():
                tensor.view(-1)[::3] = torch.nan
        replica.sync(damaged, 1)
        try:
            [completion] = replica.ask(ask("damaged", temperature=1.0))
        except BackendError:
            return
        assert not np.isfinite(completion.logprobs).all(), "NaN in the weights were replaced by other values"

    def test_greedy_text_goes_on_after_many_requests(self, replica: Replica, reference: torch.nn.Module) -> None:
        """Requests of several waves, which start while others are open, get their own completions: slots and caches
        that are used again hold nothing of the request before, and prompts that begin alike share nothing else.
        """

        async def waves() -> list[Completion]:
            tasks = []
            for number in range(12 * (MORE if stress_round() else 1)):
                request = ask(f"wave-{number}", similar_prompt(number), max_tokens=NUM_TOKENS - number % 5)
                tasks.append(asyncio.ensure_future(replica.generator.generate(request)))
                for _ in range(number % 3):
                    await asyncio.sleep(0)
            return list(await asyncio.gather(*tasks))

        for number, completion in enumerate(replica.run(waves())):
            expected = plain_greedy(reference, similar_prompt(number), NUM_TOKENS - number % 5)
            assert completion.token_ids.tolist() == expected, completion.request_id

    def _set_up_and_close(self, directory: Path, arguments: Mapping[str, Any]) -> None:
        generator = self.build_generator(directory, arguments)
        try:
            generator.setup()
        finally:
            generator.close()

    def _require_streaming(self) -> None:
        if not self.record().streaming:
            not_applicable("the record does not declare 'streaming'")


def similar_prompt(number: int) -> tuple[int, ...]:
    """Return one of many prompts, of which several have equal lengths and beginnings."""
    *start, last = PROMPTS[number % len(PROMPTS)]
    return (*start, (last + number // len(PROMPTS)) % FEW_TOKENS)


def idle_adapters(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], WeightManifest]:
    """Return adapters of the model's attention projections whose product is zero, and their manifest."""
    chosen = [n for n, t in tensors.items() if t.dim() == 2 and n.endswith(("q_proj.weight", "v_proj.weight"))]
    chosen = chosen or [name for name, tensor in tensors.items() if tensor.dim() == 2][:1]
    found: dict[str, Tensor] = {}
    for name in chosen:
        module, (rows, columns) = name.removesuffix(".weight"), tensors[name].shape
        found[f"{module}.lora_A.weight"] = torch.ones(LORA_RANK, columns)
        found[f"{module}.lora_B.weight"] = torch.zeros(rows, LORA_RANK)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "target_modules": sorted({name.removesuffix(".weight").rpartition(".")[2] for name in chosen}),
    }
    specs: dict[str, TensorSpec] = dict(manifest_of(found).tensors)
    return found, WeightManifest(specs, adapter=config)
