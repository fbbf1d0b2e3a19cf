"""The object that the adapter calls in SGLang's process: one ``sglang.Engine`` with its requests, pauses
and weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from chatlearn_hosting.engine_side.argument_names import UnknownArgumentsError, check_names
from chatlearn_hosting.engine_side.local_groups import gloo_on_loopback

from . import adapter, hooks, memory, process_copies
from .arguments import compose
from .outcome import Outcome
from .requests import answer, cut_short, engine_request, fresh_tokens, spanning_stop
from .weight_operations import LAST, LOADER, encode

RESEND_S = 0.5
"""Seconds after which an abort is sent again, because it may have overtaken its request."""
SEED_PROBE_TOKENS = 8
FLUSH_TIMEOUT_S = 10.0


class EngineFailedError(RuntimeError):
    """The engine refused or failed an operation; the message has the engine's reason."""


def launch(arguments: Mapping[str, Any], owned: Mapping[str, Any], cpu: bool) -> Awaitable[HostedEngine]:
    """Start the engine. Called before the event loop runs, as SGLang's constructor requires.

    Args:
        arguments: the user's arguments.
        owned: arguments that the adapter sets.
        cpu: whether to add the defaults for a CPU.

    Raises:
        UnknownArgumentsError: the installed SGLang does not know an argument.
    """
    import sglang
    from sglang.srt.server_args import ServerArgs

    check_names(arguments, ServerArgs.__struct_fields__)
    taken = sorted(set(arguments) & set(owned))
    if taken:
        raise UnknownArgumentsError("\n".join(f"{name}: owned by the backend" for name in taken))
    hooks.register()
    if cpu:
        process_copies.use_copies()
    with gloo_on_loopback() if int(arguments.get("nnodes", 1)) == 1 else contextlib.nullcontext():
        engine = sglang.Engine(
            **compose(arguments, owned, cpu=cpu), custom_weight_loader=[LOADER], enable_custom_logit_processor=True
        )
    return HostedEngine(engine).prepared()


class HostedEngine:
    """One engine in SGLang's process. The adapter calls one method at a time, except ``generate``, ``abort`` and
    ``load``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._open: dict[str, asyncio.Future[None]] = {}
        self._paused: Literal["in_place", "retract"] | None = None
        self._session = False
        self._adapter = adapter.NAME if engine.server_args.enable_lora else None
        self._outcome = Outcome()
        self._loading = asyncio.Lock()
        """Serialises loads: several senders' buckets may arrive at once, and SGLang runs one operation at a time in a
        session."""

    async def prepared(self) -> HostedEngine:
        """Sample a few tokens: this warms the engine up and checks that seeds take effect.

        Raises:
            EngineFailedError: seeds have no effect, so the hook that passes them does not fit this version of SGLang.
        """
        sampling = {
            "max_tokens": SEED_PROBE_TOKENS,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "stop": [],
            "stop_token_ids": [],
            "ignore_eos": True,
        }
        if self._adapter is not None:
            arguments = self._engine.server_args
            first = adapter.first_request(arguments.lora_target_modules, arguments.tp_size)
            reply = await self._manager.load_lora_adapter_from_tensors(first)
            _require((reply.success, reply.error_message or ""), "load_lora_adapter_from_tensors")
        drawn = []
        for number, seed in enumerate((1, 1, 2)):
            reply = await self.generate(f"probe-{number}", [0], {**sampling, "seed": seed})
            drawn.append(reply["token_ids"])
        if drawn[0] != drawn[1]:
            import sglang

            raise EngineFailedError(
                f"SGLang {sglang.__version__} draws different tokens from the same seed: its sampler ignores the seeds"
                " that the hook on SamplingBatchInfo.from_schedule_batch sets"
            )
        await self._flush_cache()
        return self

    def facts(self) -> dict[str, Any]:
        """Return what the adapter needs to know about the running engine."""
        import sglang

        arguments = self._engine.server_args
        return {
            "version": sglang.__version__,
            "tp_size": arguments.tp_size,
            "pp_size": arguments.pp_size,
            "keeps_memory": arguments.device != "cpu" and not arguments.enable_memory_saver,
        }

    # Requests

    async def generate(
        self,
        rid: str,
        input_ids: Sequence[int],
        sampling: Mapping[str, Any],
        emit: Callable[[list[int]], None] | None = None,
    ) -> dict[str, Any]:
        """Sample one completion; see ``requests.answer``. ``emit`` receives tokens as they appear.

        With ``ignore_eos`` SGLang also ignores stop tokens, so this method checks for them and ends the request itself;
        likewise for a stop string that begins in the text of a resumed completion.
        """
        ended = self._open[rid] = asyncio.get_running_loop().create_future()
        stops = frozenset(sampling["stop_token_ids"] if sampling["ignore_eos"] else ())
        before = sampling.get("text_before", "")
        try:
            vocab_size = self._manager.model_config.vocab_size
            request = engine_request(rid, input_ids, sampling, vocab_size, self._adapter)
            if emit is None and not stops and not before:
                return answer(await self._engine.async_generate(**request))
            seen, end = 0, None
            async for chunk in await self._engine.async_generate(**request, stream=True):
                tokens = fresh_tokens(chunk, seen)
                if end is None:
                    at = next((index for index, token in enumerate(tokens) if token in stops), None)
                    if before:
                        spanning = spanning_stop(before, sampling["stop"], chunk["output_ids"], seen, self._decode)
                        at = min((index for index in (at, spanning) if index is not None), default=None)
                        if len(chunk["text"]) >= max(map(len, sampling["stop"])):
                            before = ""  # what follows is too far from it
                    if at is not None:
                        tokens, end = tokens[: at + 1], seen + at + 1
                        self._manager.abort_request(rid)
                    if emit is not None and tokens:
                        emit(tokens)
                    seen += len(tokens)
            reply = answer(chunk)
            return reply if end is None else cut_short(reply, end, self._decode(reply["token_ids"][:end]))
        finally:
            del self._open[rid]
            ended.set_result(None)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._manager.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    async def abort(self, rids: Sequence[str] | None) -> None:
        """End these requests (None: all), and return when they have ended. Requests that ended before are ignored.

        While paused, requests are first moved out of the batch, because SGLang ends a running request only in its next
        step.
        """
        if self._paused == "in_place":
            await self._pause("retract")
        wanted = set(self._open if rids is None else rids)
        while waiting := [future for rid, future in self._open.items() if rid in wanted]:
            for rid in wanted & self._open.keys():
                state = self._manager.rid_to_state.get(rid)
                if state is not None:
                    state.abort_sent = False
                    self._manager.abort_request(rid)
            await asyncio.wait(waiting, timeout=RESEND_S)

    async def pause(self) -> None:
        """Stop stepping. Running requests keep their KV cache. Returns when the last step has finished."""
        if self._paused is None:
            await self._pause("in_place")

    async def resume(self) -> None:
        """Continue stepping."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if self._paused is not None:
            await self._manager.continue_generation(ContinueGenerationReqInput())
            self._paused = None

    # Memory

    async def release(self, parts: Sequence[str]) -> None:
        """Release memory. Paused requests recompute their KV cache when they continue."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if self._paused == "in_place":
            await self._pause("retract")
        if self._paused is None:
            await self._flush_cache()  # a release crashes a scheduler that still holds an answered request
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(parts)))

    async def reclaim(self, parts: Sequence[str]) -> None:
        """Restore released memory."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(parts)))

    async def live_bytes(self, part: str) -> int:
        """Bytes that a part occupies now, measured by the schedulers of the first pipeline stage and summed.

        Raises:
            EngineFailedError: the schedulers report no sizes, so the measuring hook does not fit this version of
                SGLang.
        """
        states = await self._manager.get_internal_state()
        if any(memory.STATE_KEY not in state for state in states):
            import sglang

            raise EngineFailedError(f"SGLang {sglang.__version__} does not report the size of its memory parts")
        return sum(int(state[memory.STATE_KEY][part]) for state in states)

    # Weights

    async def begin_weights(self) -> None:
        """Stop stepping and free the KV cache of running requests, because it belongs to the old weights."""
        await self._pause("retract")

    async def load(self, operation: str, content: Mapping[str, Any]) -> None:
        """Run one of ``weight_operations.OPERATIONS`` on every rank.

        Raises:
            EngineFailedError: a rank failed; the message names the rank and the reason.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        async with self._loading:
            alone = self._paused is None
            if alone:
                await self.begin_weights()  # a request that ended may still occupy the cache; "in_place" would keep it
            await self._open_session()
            ranks = self._engine.server_args.tp_size
            payload = encode(operation, content, self._outcome.path)
            self._outcome.clear()
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[payload] * ranks, load_format=LOADER, flush_cache=operation == LAST
            )
            _require(await self._manager.update_weights_from_tensor(request, None), operation)
            errors = self._outcome.errors()
            if alone:
                await self._close_session()
                await self.resume()
        if errors:
            raise EngineFailedError("; ".join(errors))

    async def finish_weights(self, version: int, stay_paused: bool) -> None:
        """Finalise the model, set the new version, drop caches computed with the old weights, and continue."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._close_session()
        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        )
        if self._adapter is not None:
            await self._flush_cache()  # this also runs Python's garbage collection, which the operation LAST skips
        if not stay_paused:
            await self.resume()

    def close(self) -> None:
        """End the engine's processes."""
        self._outcome.close()
        self._engine.shutdown()

    async def _pause(self, mode: Literal["in_place", "retract"]) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput, UpdateWeightVersionReqInput

        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))
        self._paused = mode
        # The scheduler answers in order, but does not answer a pause: once it answers the next message it has paused.
        current = self._manager.config_value("weight_version")
        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=current, abort_all_requests=False)
        )

    async def _open_session(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if not self._session:
            _require(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None), "begin_weight_update")
            self._session = True

    async def _close_session(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        if self._session:
            _require(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None), "end_weight_update")
            self._session = False

    async def _flush_cache(self) -> None:
        # A request is answered one step before the scheduler releases it. A paused scheduler would never retry.
        reply = await self._manager.flush_cache(timeout_s=FLUSH_TIMEOUT_S if self._paused is None else None)
        if not reply.success:
            raise EngineFailedError(f"flush_cache: {reply.message or 'requests are still running'}")


def _require(reply: tuple[bool, str], what: str) -> None:
    success, message = reply
    if not success:
        raise EngineFailedError(f"{what}: {message}")
