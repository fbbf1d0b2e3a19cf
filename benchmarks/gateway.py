"""What the gateway of ``chatlearn-gateway`` adds to a generator: latency, requests a second, memory a session.

    python benchmarks/gateway.py [--sessions 1 16 64 256] [--turns 6] [--answer-s 2] [--quick]

The generator is a fake that answers after a fixed time with 64 tokens. Every session is a conversation that goes on
turn by turn, and its client waits for each answer. A plain HTTP client in a process of its own sends the requests, so
that clients do not take the server's time.

``added_ms``: time of a request through the gateway less the median of the generator's own, with sessions that start at
times spread over one answer. ``requests_per_s``: if the generator answers at once. ``memory``: bytes that a recorded
session holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
from machine import machine_facts

from chatlearn_chat import ChatTemplateRenderer
from chatlearn_chat.turn_reader import TurnReader
from chatlearn_core.protocols import RolloutContext, RolloutOrder
from chatlearn_core.types import Completion, GenerateRequest, Prompt, SamplingParams, VersionSpan
from chatlearn_gateway.chat import ChatRequest
from chatlearn_gateway.server import Gateway
from chatlearn_gateway.session import Session
from chatlearn_hf.tiny import build_tiny_tokenizer

AIM_S = 0.005
"""Seconds that the gateway may add to a request at the median."""
GROWTH_AIM = 2.0
"""Median with the most sessions over that with the fewest."""
ANSWER_TOKENS = 64
CLIENT_TIMEOUT_S = 300.0


class FixedTimeGenerator:
    """Answers every request after the same time, with tokens drawn once."""

    def __init__(self, tokenizer: Any, answer_s: float) -> None:
        self.answer_s = answer_s
        self.times_s: list[float] = []
        """Seconds that each answer took: an event loop wakes up later than asked."""
        draw = np.random.default_rng(0)
        letters = tokenizer.encode("abcdefghijklmnop", add_special_tokens=False)
        self._ids = np.append(draw.choice(letters, ANSWER_TOKENS - 1), tokenizer.eos_token_id).astype(np.int64)

    async def __call__(self, handle: str, request: GenerateRequest) -> Completion:
        begin = time.perf_counter()
        await asyncio.sleep(self.answer_s)
        self.times_s.append(time.perf_counter() - begin)
        return Completion(
            request_id=request.id,
            token_ids=self._ids,
            logprobs=np.full(ANSWER_TOKENS, -1.0, np.float32),
            basis=request.sampling.basis,
            finish_reason="stop",
            sampling=request.sampling,
            version_spans=(VersionSpan(0, ANSWER_TOKENS, 0),),
        )


def session_of(index: int, reader: TurnReader, generator: FixedTimeGenerator, loop: Any = None) -> Session:
    """A session whose generator runs on ``loop``, as the generator of an environment does; None: on the caller's."""
    prompt = Prompt(f"p{index}", np.array([1], np.int64), "?")
    order = RolloutOrder(f"p{index}@0#0", f"p{index}@0", prompt, SamplingParams(ANSWER_TOKENS), index, 1 << 20, 600.0)
    context = RolloutContext(order, reader.renderer.tokenizer, generator)
    if loop is None:
        return Session(context, reader)

    async def generate(token_ids: Any, sampling: SamplingParams, role: str | None) -> Completion:
        asked = asyncio.run_coroutine_threadsafe(context.generate(token_ids, sampling=sampling, role=role), loop)
        return await asyncio.wrap_future(asked)

    return Session(context, reader, generate)


async def through(
    num_sessions: int, turns: int, generator: FixedTimeGenerator, reader: TurnReader
) -> tuple[list[float], float]:
    """Seconds of each request through the gateway, and those of all of them."""
    gateway = Gateway()
    gateway.start()
    try:
        loop = asyncio.get_running_loop()
        sessions = [session_of(index, reader, generator, loop) for index in range(num_sessions)]
        keys = [gateway.open(session) for session in sessions]
        work = {"url": gateway.url, "keys": keys, "turns": turns, "spread_s": generator.answer_s}
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            "--client",
            stdin=asyncio.subprocess.PIPE,  # not an argument: every user of a machine reads those
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(CLIENT_TIMEOUT_S):
            output, _ = await client.communicate(json.dumps(work).encode())
        assert client.returncode == 0, "the client failed; see its error above"
        recorded = [session.samples() for session in sessions]
        assert all([len(sample.turns) for sample in samples] == [turns] for samples in recorded), "a turn is missing"
    finally:
        gateway.close()
    measured = json.loads(output)
    return measured["latencies_s"], measured["wall_s"]


async def clients(work: dict[str, Any]) -> dict[str, Any]:
    """The conversations of all sessions, each over a connection that stays open."""
    host, port = work["url"].removeprefix("http://").split(":")
    latencies: list[float] = []

    async def converse(index: int, key: str) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        messages = [{"role": "user", "content": f"Question {index}: what comes next?"}]
        await asyncio.sleep(work["spread_s"] * index / len(work["keys"]))
        for _ in range(work["turns"]):
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            begin = time.perf_counter()
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            [length] = [line for line in answer.decode().lower().splitlines() if line.startswith("content-length")]
            received = await reader.readexactly(int(length.partition(":")[2]))
            latencies.append(time.perf_counter() - begin)
            messages.append(json.loads(received)["choices"][0]["message"])
            messages.append({"role": "user", "content": "Go on."})
        writer.close()

    begin = time.perf_counter()
    await asyncio.gather(*(converse(index, key) for index, key in enumerate(work["keys"])))
    return {"latencies_s": latencies, "wall_s": time.perf_counter() - begin}


async def memory(num_sessions: int, turns: int, reader: TurnReader) -> dict[str, float]:
    """Bytes that a session of some turns holds, and its tokens."""
    generator = FixedTimeGenerator(reader.renderer.tokenizer, 0.0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    sessions = []
    for index in range(num_sessions):
        session = session_of(index, reader, generator)
        messages: list[Any] = [{"role": "user", "content": f"Question {index}: what comes next?"}]
        for _ in range(turns):
            reply = await session.reply(ChatRequest(tuple(messages)))
            reply.commit()
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "Go on."}]
        sessions.append(session)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    num_tokens = sum(len(sample.token_ids) for session in sessions for sample in session.samples())
    return {"bytes": round(held / num_sessions), "tokens": round(num_tokens / num_sessions), "turns": turns}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    ranked = sorted(values)
    figures = {"median": statistics.median(ranked), "p95": ranked[int(0.95 * (len(ranked) - 1))], "highest": ranked[-1]}
    return {name: round(1e3 * value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--turns", type=int, default=6, help="requests of each session")
    parser.add_argument("--answer-s", type=float, default=2.0, help="seconds of an answer, for the latency")
    parser.add_argument("--quick", action="store_true", help="next to nothing, to see that it works")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        print(json.dumps(asyncio.run(clients(json.load(sys.stdin)))))
        return
    if arguments.quick:
        arguments.sessions, arguments.turns, arguments.answer_s = [1, 4], 2, 0.05
    reader = TurnReader(ChatTemplateRenderer(build_tiny_tokenizer()))
    tokenizer = reader.renderer.tokenizer
    rows = []
    for count in arguments.sessions:
        waiting = FixedTimeGenerator(tokenizer, arguments.answer_s)
        latencies, _ = asyncio.run(through(count, arguments.turns, waiting, reader))
        _, wall_s = asyncio.run(through(count, arguments.turns, FixedTimeGenerator(tokenizer, 0.0), reader))
        base = statistics.median(waiting.times_s)
        rows.append(
            {
                "sessions": count,
                "generator_ms": spread(waiting.times_s),
                "added_ms": spread([one - base for one in latencies]),
                "requests_per_s": round(count * arguments.turns / wall_s, 1),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
    medians = [row["added_ms"]["median"] for row in rows]
    growth = medians[-1] / medians[0]
    result = {
        "benchmark": "gateway",
        "rows": rows,
        "growth": round(growth, 2),
        "memory": asyncio.run(memory(4 if arguments.quick else 64, arguments.turns, reader)),
        "aim": {"added_ms": 1e3 * AIM_S, "growth": GROWTH_AIM},
        "met": max(medians) < 1e3 * AIM_S and growth <= GROWTH_AIM,
        "answer_s": arguments.answer_s,
        "turns": arguments.turns,
        "machine": machine_facts(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
