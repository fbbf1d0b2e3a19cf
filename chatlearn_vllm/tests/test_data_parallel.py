"""Several ranks of one engine: a real one, and how its host deals with ranks that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import Future

import pytest
import torch

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, HostedCallError, HostedProcessLostError
from chatlearn_hosting.process_group import live_members
from chatlearn_testing.model_directory import copy_with_weights, manifest_of, perturbed, read_checkpoint
from chatlearn_vllm import data_parallel
from chatlearn_vllm.conformance import ENGINE_ARGUMENTS
from chatlearn_vllm.data_parallel import DataParallelHost
from chatlearn_vllm.engine_arguments import RANK_VARIABLES

PROMPTS = ([5, 9, 3], [17, 2, 30, 11, 8], [4], [21, 21, 6, 13, 19, 7, 25])
NUM_TOKENS = (12, 3, 20, 7)


def continued(plain, ids, count):
    """What plain transformers generates after ``ids``."""
    out = plain.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=count, pad_token_id=0, eos_token_id=None)
    return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def model(model_dir):
    return model_dir("qwen3_moe")


@pytest.fixture(scope="module")
def other(model, tmp_path_factory):
    """The same model with other weights."""
    return copy_with_weights(model, perturbed(read_checkpoint(model), seed=1), tmp_path_factory.mktemp("other") / "m")


@pytest.fixture(scope="module")
def greedy(load_model):
    """``greedy(directory)``: what plain transformers generates for all prompts."""

    def generate(directory):
        plain = load_model(directory)
        return [continued(plain, prompt, count) for prompt, count in zip(PROMPTS, NUM_TOKENS, strict=True)]

    return generate


class FakeRank:
    """A ``ChildHost`` and its process, which answer when a test says so."""

    def __init__(self, name, start_timeout_s, *, python, environment, in_lockstep):
        assert in_lockstep
        self.name, self.environment = name, environment
        self.process = self
        self.lost = None
        self.told = []
        self.waiting = []
        self.answers = {"start": {"num_workers": 2, "dtype": "float32"}}
        """By method: what is answered at once."""

    def start(self, timeout_s):
        self.told.append("started")

    def begin(self, do, method, *arguments):
        assert do == "do"
        if self.lost is not None:
            raise HostedProcessLostError(f"{self.name}: {method} failed: {self.lost}")
        self.told.append((method, *arguments))
        future = Future()
        if method in self.answers:
            self.answer(self.answers[method], future)
        else:
            self.waiting.append(future)
        return future

    def answer(self, value, future=None):
        future = self.waiting.pop(0) if future is None else future
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    def lose(self, why):
        self.lost = self.lost or why
        while self.waiting:
            self.answer(HostedProcessLostError(f"{self.name}: do failed: {self.lost}"))

    def listen(self, on_event):
        self.on_event = on_event

    def timeout_error(self, method, timeout_s):
        return BackendTimeoutError(f"{self.name}: {method} had no answer within {timeout_s:g} s")

    def close(self, grace_s=10.0):
        self.told.append("closed")
        self.lose("it was closed")


def failure(rank, text, kind="RuntimeError"):
    error = HostedCallError(f"r, data-parallel rank {rank}: do failed: {kind}: {text}")
    error.type_name, error.text = kind, text
    return error


@pytest.fixture
def make_host(monkeypatch):
    """``make_host()``: of two ranks; it has been started unless ``started=False``."""
    monkeypatch.setattr(data_parallel, "ChildHost", FakeRank)
    monkeypatch.setattr(data_parallel, "_GRACE_S", 0.01)
    monkeypatch.setattr(data_parallel, "_FAILURE_REPORT_WAIT_S", 0.01)

    def make(*, answers=()):
        host = DataParallelHost("r", 5.0, num_ranks=2, python=None, environment={"SEEN": "0,1"})
        if answers:
            made = iter(answers)
            original = host._rank

            def rank(number, port):
                found = original(number, port)
                found.answers["start"] = next(made)
                return found

            monkeypatch.setattr(host, "_rank", rank)
        host.facts = host.start({"model": "m"}, log_level="error", num_threads=None)
        return host

    return make


def wire(key, *prompt):
    return {"key": key, "prompt_ids": list(prompt), "prior_ids": [], "max_tokens": 4}


class TestHost:
    """Ranks that answer as a test says."""

    def test_ranks_share_one_rendezvous_and_count_as_one_engine(self, make_host):
        host = make_host()
        meeting = [{name: v for name, v in rank.environment.items() if "RANK" not in name} for rank in host.ranks]
        assert meeting[0] == meeting[1]
        assert meeting[0].keys() == {"SEEN", "VLLM_DP_SIZE", "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT"}
        assert [rank.environment["VLLM_DP_RANK"] for rank in host.ranks] == ["0", "1"]
        assert set(host.ranks[0].environment) - {"SEEN"} == set(RANK_VARIABLES)
        assert host.facts == {"num_workers": 4, "dtype": "float32"}

    async def test_all_ranks_receive_the_same_commands_in_order_except_for_their_own_requests(self, make_host):
        host = make_host()
        for rank in host.ranks:
            rank.answers |= {"pause": None, "live_bytes": 10, "abort": None}
        host.submit([wire(1, 5), wire(2, 6), wire(3, 5)])
        assert await host.call("pause") is None
        assert host.call_blocking("live_bytes", "weights", timeout_s=5) == 20
        host.drop([1])
        await host.call("abort", [2, 3])
        first, second = ([told for told in rank.told if told[0] != "submit"] for rank in host.ranks)
        assert first == second
        assert first[2:] == [("pause",), ("live_bytes", "weights"), ("drop", [1]), ("abort", [2, 3])]
        assert [rank.told[2] for rank in host.ranks] == [
            ("submit", [wire(1, 5), wire(3, 5)]),
            ("submit", [wire(2, 6)]),
        ]
        assert list(host._routing.open_tokens) == [0, 0]

    async def test_the_workers_of_each_rank_take_ranks_of_their_own_in_a_process_group(self, make_host):
        host = make_host()
        for rank in host.ranks:
            rank.answers["group"] = None
        await host.call("group", {"action": "join", "first_rank": 3, "name": "g"})
        await host.call("group", {"action": "leave", "name": "g"})
        assert [rank.told[2][1]["first_rank"] for rank in host.ranks] == [3, 5]
        assert [rank.told[3][1] for rank in host.ranks] == [{"action": "leave", "name": "g"}] * 2

    async def test_ended_requests_are_no_longer_open(self, make_host):
        host, events = make_host(), []
        host.listen(events.append)
        host.submit([wire(1, 5), wire(2, 6)])
        told = [
            ("tokens", 0, [(1, [7], [0.0], None, None, None)]),
            ("tokens", 0, [(1, [7], [0.0], "stop", None, None)]),
        ]
        for event in told:
            host.ranks[0].on_event(event)
        assert list(host._routing.open_tokens) == [0, 5]
        host.ranks[1].on_event(("refused", 2, "too long"))
        assert list(host._routing.open_tokens) == [0, 0]
        assert events == [*told, ("refused", 2, "too long")]

    async def test_a_call_that_fails_on_one_rank_ends_all_ranks(self, make_host):
        host = make_host()
        host.ranks[0].answers["load"], host.ranks[1].answers["load"] = None, failure(1, "no memory")
        with pytest.raises(HostedCallError, match=r"data-parallel rank 1: .*no memory"):
            await host.call("load")
        await closed(host)
        with pytest.raises(BackendError, match=r"resume failed: .*rank 1: .*no memory"):
            await host.call("resume")

    @pytest.mark.parametrize("method", ["group", "live_bytes"])
    async def test_ranks_stay_in_step_after_a_failed_call_that_changes_nothing(self, method, make_host):
        host = make_host()
        host.ranks[0].answers[method], host.ranks[1].answers[method] = 1, failure(1, "too late")
        with pytest.raises(HostedCallError, match="too late"):
            await host.call(method, {"action": "leave"})
        assert "closed" not in host.ranks[0].told

    async def test_a_call_that_fails_on_all_ranks_leaves_them_in_step(self, make_host):
        host = make_host()
        for number, rank in enumerate(host.ranks):
            rank.answers["load"] = failure(number, "no such file")
        with pytest.raises(HostedCallError, match=r"rank 0: .*no such file"):
            await host.call("load")
        assert "closed" not in host.ranks[0].told

    def test_ranks_that_wait_for_a_failed_rank_are_ended(self, make_host):
        host = make_host()
        host.ranks[1].answers["wake"] = failure(1, "no memory")
        with pytest.raises(HostedCallError, match=r"data-parallel rank 1: .*no memory"):
            host.call_blocking("wake", [], timeout_s=20)

    def test_a_lost_rank_is_the_reason_even_if_another_rank_fails_first(self, make_host, monkeypatch):
        host = make_host()
        monkeypatch.setattr(data_parallel, "_GRACE_S", 20)
        host.ranks[0].answers["wake"] = failure(0, "connection closed by peer")
        threading.Timer(0.001, host.ranks[1].lose, ["killed by SIGKILL"]).start()
        with pytest.raises(HostedProcessLostError, match=r"rank 1: .*SIGKILL"):
            host.call_blocking("wake", [], timeout_s=20)

    def test_ranks_that_do_not_answer_are_named(self, make_host):
        host = make_host()
        host.ranks[0].answers["sleep"] = None
        with pytest.raises(
            BackendTimeoutError, match=r"of 2 data-parallel ranks \[1\] did not answer.*\n.*rank 1: sleep"
        ):
            host.call_blocking("sleep", 1, timeout_s=0.01)

    def test_a_start_that_fails_names_the_rank(self, make_host):
        with pytest.raises(HostedCallError) as caught:
            make_host(answers=[{"num_workers": 1}, failure(1, "no GPU", "StartError")])
        assert (caught.value.type_name, caught.value.text) == ("StartError", "data-parallel rank 1: no GPU")

    async def test_the_end_of_one_process_ends_all_and_is_reported_once(self, make_host):
        host, events = make_host(), []
        host.listen(events.append)
        host.ranks[0].on_event(("dead", "connection closed by peer", None))
        host.ranks[1].lose("killed by SIGKILL")
        host.ranks[1].on_event(("dead", "rank 1: killed by SIGKILL", None))
        await closed(host)
        host.ranks[0].on_event(("dead", "it was closed", None))
        await asyncio.sleep(0.03)
        assert events == [("dead", "rank 1: killed by SIGKILL", None)]

    async def test_failures_of_several_engines_are_reported_together(self, make_host):
        host, events = make_host(), asyncio.Queue()
        host.listen(events.put_nowait)
        host.ranks[1].on_event(("dead", "no memory", None))
        host.ranks[0].on_event(("dead", "connection closed", None))
        kind, reason, _ = await events.get()
        assert (kind, reason) == ("dead", "data-parallel rank 0: connection closed\ndata-parallel rank 1: no memory")
        await closed(host)

    def test_closing_ends_all_ranks_and_may_be_done_twice(self, make_host):
        host = make_host()
        host.close()
        host.close()
        assert [rank.told.count("closed") for rank in host.ranks] == [2, 2]


async def closed(host):
    """All ranks have been told to end, by threads."""
    while not all("closed" in rank.told for rank in host.ranks):
        await asyncio.sleep(0.001)


@pytest.mark.engine
class TestEngine:
    """One engine of two ranks for all; tests leave it serving the weights of ``model``, the last ends it."""

    @pytest.fixture(scope="class")
    @classmethod
    def replica(cls, model, make_replica):
        replica = make_replica(model, engine={"data_parallel_size": 2}, bucket_mb=1)
        yield replica
        replica.close()

    @pytest.fixture
    def answers(self, replica, make_request):
        """``answers()``: to all prompts at once, of different lengths."""

        async def generate():
            requests = [
                make_request(prompt, f"r{index}", max_tokens=count)
                for index, (prompt, count) in enumerate(zip(PROMPTS, NUM_TOKENS, strict=True))
            ]
            return await asyncio.gather(*map(replica.generator.generate, requests))

        return lambda: replica.run(generate())

    def test_uneven_requests_on_both_ranks_are_answered_as_by_transformers(self, model, answers, greedy):
        assert [answer.token_ids.tolist() for answer in answers()] == greedy(model)

    def test_a_rank_without_requests_steps_along(self, replica, make_request, model, greedy):
        """Requests of one prompt go to one rank."""

        async def generate():
            requests = [make_request(PROMPTS[0], f"r{index}", max_tokens=12 - index) for index in range(3)]
            answers = [asyncio.ensure_future(replica.generator.generate(request)) for request in requests]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert sorted(replica.generator._host._routing.open_tokens) == [0, 3 * len(PROMPTS[0]) + 12 + 11 + 10]
            return await asyncio.gather(*answers)

        expected = greedy(model)[0]
        assert [answer.token_ids.tolist() for answer in replica.run(generate())] == [
            expected,
            expected[:-1],
            expected[:-2],
        ]

    def test_reloading_the_same_weights_changes_nothing(self, model, replica):
        def sampled():
            return [replica.generate(prompt, temperature=1.0, seed=3) for prompt in PROMPTS]

        replica.sync(read_checkpoint(model))
        before = sampled()
        replica.sync(read_checkpoint(model))
        for old, new in zip(before, sampled(), strict=True):
            assert new.token_ids.tolist() == old.token_ids.tolist()
            assert new.logprobs.tobytes() == old.logprobs.tobytes()

    def test_every_rank_follows_syncs_by_shared_memory_process_group_and_checkpoint(
        self, model, other, replica, answers, greedy, receive
    ):
        replica.sync(read_checkpoint(other))
        assert [answer.token_ids.tolist() for answer in answers()] == greedy(other)
        loader = replica.loader
        assert loader.num_group_ranks == 2

        async def load(directory, how):
            version = replica.generator.policy_version + 1
            tensors = read_checkpoint(directory)
            await loader.begin(version, manifest_of(tensors, loader.expected_manifest().aliases))
            await how(tensors)
            assert await loader.finish() == version

        replica.run(load(model, lambda tensors: receive(loader, tensors)))
        assert [answer.token_ids.tolist() for answer in answers()] == greedy(model)
        replica.run(load(other, lambda _: loader.load_checkpoint(other)))
        assert [answer.token_ids.tolist() for answer in answers()] == greedy(other)
        replica.sync(read_checkpoint(model))

    def test_paused_requests_continue_under_new_weights_and_aborted_ones_can_be_resumed(
        self, model, other, replica, make_request, load_model
    ):
        generator, weights = replica.generator, read_checkpoint(other)

        async def interrupted():
            begun = [asyncio.Event() for _ in PROMPTS]
            tasks = [
                asyncio.ensure_future(
                    generator.generate(make_request(prompt, f"r{index}", max_tokens=60), lambda *_, e=event: e.set())
                )
                for index, (prompt, event) in enumerate(zip(PROMPTS, begun, strict=True))
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            await generator.abort({"r0"})
            partial = await tasks[0]
            await generator.pause()
            generator.offload({"kv_cache"})
            generator.onload({"kv_cache"})
            assert not any(task.done() for task in tasks[1:])
            version = generator.policy_version + 1
            await generator.loader.begin(version, manifest_of(weights, generator.loader.expected_manifest().aliases))
            await generator.loader.load_tensors(weights.items())
            await generator.loader.finish()
            await generator.resume()
            resumed = make_request(PROMPTS[0], "again", max_tokens=60, resume_from=partial)
            return partial, await asyncio.gather(generator.generate(resumed), *tasks[1:])

        partial, answers = replica.run(interrupted())
        assert partial.finish_reason == "abort"
        assert answers[0].token_ids[: len(partial.token_ids)].tolist() == partial.token_ids.tolist()
        before, after = load_model(model), load_model(other)
        version = generator.policy_version
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            first, second = answer.version_spans
            assert (first.version, second.version, second.stop) == (version - 1, version, 60)
            tokens = answer.token_ids.tolist()
            assert tokens[: first.stop] == continued(before, prompt, first.stop)
            assert tokens[first.stop :] == continued(after, [*prompt, *tokens[: first.stop]], 60 - first.stop)
        replica.sync(read_checkpoint(model))

    def test_memory_is_that_of_all_ranks_and_comes_back(self, replica, answers, model, greedy):
        generator = replica.generator
        weights = generator.live_bytes("weights")
        assert weights >= sum(tensor.nbytes for tensor in read_checkpoint(model).values())
        assert generator.live_bytes("kv_cache") == 2 * ENGINE_ARGUMENTS["kv_cache_memory_bytes"]
        generator.offload({"weights", "kv_cache"})
        assert [generator.live_bytes(part) for part in ("weights", "kv_cache")] == [0, 0]
        generator.onload({"weights", "kv_cache"})
        assert generator.live_bytes("weights") == weights
        assert [answer.token_ids.tolist() for answer in answers()] == greedy(model)

    def test_a_killed_rank_fails_requests_on_every_rank_and_is_named(self, replica, make_request):
        """Last in the class: it ends the engine."""
        generator = replica.generator
        processes = [rank.process.pid for rank in generator._host.ranks]

        async def killed():
            begun = [asyncio.Event() for _ in PROMPTS]
            tasks = [
                asyncio.ensure_future(
                    generator.generate(
                        make_request(prompt, f"r{index}", max_tokens=100), lambda *_, event=begun[index]: event.set()
                    )
                )
                for index, prompt in enumerate(PROMPTS)
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            os.kill(processes[1], signal.SIGKILL)
            return await asyncio.gather(*tasks, return_exceptions=True)

        for index, error in enumerate(replica.run(killed())):
            assert isinstance(error, BackendError)
            assert f"request 'r{index}' failed: the engine died" in str(error)
            assert "data-parallel rank 1" in str(error)
            assert "SIGKILL" in str(error)
        assert generator.state == "dead"
        replica.close()
        assert [live_members(process) for process in processes] == [[], []]
