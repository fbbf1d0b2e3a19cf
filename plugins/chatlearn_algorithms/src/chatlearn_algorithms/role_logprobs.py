"""Logprobs of sequences that a flow's call has made itself, such as those of other prompts or another vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_core.executor.scheduler import FlowCall
from chatlearn_core.plugins import builtin
from chatlearn_core.runtime.outputs import check_outputs
from chatlearn_core.types import Floats, OutputRequest, Sample, pack_samples, per_sequence

_LOGPROBS = next(spec for spec in builtin.chatlearn_outputs() if spec.name == "logprobs")


async def role_logprobs(call: FlowCall, sequences: Sequence[Sample]) -> list[Floats]:
    """[T] logprobs of each sequence under the call's trainer role, at the call's temperature.

    Raises:
        BackendError, ContractError: the role failed.
    """
    batch = pack_samples(sequences)
    temperature = call.node.arguments.get("temperature", call.sampling.temperature or 1.0)
    asked = OutputRequest(frozenset({"logprobs"}), temperature)
    outputs = await call.runtime.trainer(call.node.role).compute(batch, asked)
    check_outputs(outputs, batch, asked, call.origin, {"logprobs": _LOGPROBS})
    rows = per_sequence(outputs["logprobs"], batch.lengths, batch.sample_ids, "logprobs")
    for sequence, row in zip(sequences, rows, strict=True):
        sequence.token_data["logprobs"] = row
    fetched = await call.runtime.data.aget(sequences, {"logprobs"})
    return [sequence.token_data["logprobs"] for sequence in fetched]
