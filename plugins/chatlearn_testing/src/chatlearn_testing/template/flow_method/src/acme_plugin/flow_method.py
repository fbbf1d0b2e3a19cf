"""The flow method ``trainer.acme``: what a trainer thinks of whole samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from chatlearn_core.executor.flow_calls import compute
from chatlearn_core.executor.scheduler import FlowCall
from chatlearn_core.executor.step_samples import RolloutRequest


async def mean_logprobs(call: FlowCall, requests: Sequence[RolloutRequest]) -> None:
    """Add ``token_data["{role}_logprobs"]``, and their mean over the tokens in the loss mask as
    ``sequence_data["{role}_acme"]``.

    Raises:
        BackendError, ContractError: the role failed, or its values break a rule.
    """
    await compute(call, requests)  # asks the role for the outputs of the record, and checks and stores them
    logprobs, mean = call.node.output_fields["logprobs"], call.node.fields[-1]
    samples = [sample for request in requests for sample in request.samples if sample.loss_mask.any()]
    if not samples:
        return
    plain = await call.runtime.data.aget(samples, {logprobs})  # the values may be on a worker
    for sample, fetched in zip(samples, plain, strict=True):
        of_sample = fetched.token_data[logprobs][sample.loss_mask]
        sample.sequence_data[mean] = float(np.mean(of_sample, dtype=np.float64))
