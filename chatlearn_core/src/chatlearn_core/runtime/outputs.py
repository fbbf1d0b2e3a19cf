"""Checks of trainers' outputs against their records: rows, shape, type and bounds of every number.

For references only shape and type are checked here: the worker that computed them checks their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chatlearn_core.exceptions import ContractError
from chatlearn_core.plugins.records import OutputSpec
from chatlearn_core.runtime.boundary import LOGPROB_TOLERANCE, Origin, some
from chatlearn_core.types import OutputRequest, TrainBatch
from chatlearn_core.types.array_ref import TensorRef


def check_outputs(
    outputs: Any,
    batch: TrainBatch,
    request: OutputRequest,
    origin: Origin,
    specs: Mapping[str, OutputSpec],
    *,
    whole: bool = True,
) -> None:
    """Check a trainer's outputs for a batch; outputs that were not requested are ignored.

    Args:
        specs: the records of all outputs, by name.
        whole: whether every requested output must exist; one rank of several may return only some, or none.

    Raises:
        ContractError: an output is missing, has another shape or type than its record, or holds a number that is not
            finite or out of bounds at a position that a loss reads.
    """
    if not isinstance(outputs, Mapping):
        raise ContractError(f"{origin}: compute returned a {type(outputs).__name__}, not a mapping of outputs")
    missing = sorted(request.names - outputs.keys()) if whole else []
    if missing:
        raise ContractError(
            f"{origin}: compute did not return the output {missing[0]!r}, which was requested; it returned "
            f"{', '.join(sorted(outputs)) or 'nothing'}"
        )
    for name in sorted(request.names & outputs.keys()):
        if name not in specs:
            raise ContractError(
                f"{origin}: the output {name!r} was asked for, which no installed plugin describes "
                f"(chatlearn_outputs); there are {', '.join(sorted(specs))}"
            )
        _check_output(outputs[name], batch, request, origin, specs[name])


def _check_output(values: Any, batch: TrainBatch, request: OutputRequest, origin: Origin, spec: OutputSpec) -> None:
    rows = batch.num_sequences if spec.per == "sequence" else batch.num_tokens
    what = "floating-point numbers" if spec.dtype == "float" else "int64"
    is_right = isinstance(values, Tensor | TensorRef) and (
        values.is_floating_point() if spec.dtype == "float" else values.dtype == torch.int64
    )
    if not is_right:
        kind = values.dtype if isinstance(values, Tensor | TensorRef) else type(values).__name__
        raise ContractError(f"{origin}: compute returned {spec.name!r} as {kind}, not as a tensor of {what}")
    row = row_shape(spec, batch, request)
    fits = len(values.shape) == 1 + len(row) and all(
        size in (None, found) for size, found in zip(row, values.shape[1:], strict=True)
    )
    if values.shape[:1] != (rows,) or not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in (rows, *row))
        raise ContractError(
            f"{origin}: compute returned {spec.name!r} in the shape {list(values.shape)}, not [{wanted}], for {rows} "
            f"{'sequences' if spec.per == 'sequence' else 'tokens'} of the samples {some(batch.sample_ids)}"
        )
    if not isinstance(values, TensorRef):
        _check_values(values, batch, origin, spec)


def row_shape(spec: OutputSpec, batch: TrainBatch, request: OutputRequest) -> tuple[int | None, ...]:
    """Sizes of one row of an output; None for any size.

    Raises:
        ContractError: the request or the batch lacks something that the record requires.
    """
    sizes: list[int | None] = []
    for size in spec.shape:
        if not isinstance(size, str):
            sizes.append(size)
            continue
        if size not in request.arguments:
            raise ContractError(f"the output {spec.name!r} was asked for without its argument {size!r}")
        given = request.arguments[size]
        if size not in spec.from_batch:
            sizes.append(int(given))
        elif given in batch.token_data:
            sizes.extend(batch.token_data[str(given)].shape[1:])
        else:
            raise ContractError(
                f"the output {spec.name!r} reads the token data {given!r}, which the batch does not have; it has "
                f"{', '.join(sorted(batch.token_data)) or 'none'}"
            )
    return tuple(sizes)


def _check_values(values: Tensor, batch: TrainBatch, origin: Origin, spec: OutputSpec) -> None:
    rows = values[:, None] if values.ndim == 1 else values.flatten(start_dim=1)  # also valid for an empty batch
    slack = LOGPROB_TOLERANCE if spec.dtype == "float" else 0.0
    wrong = ~torch.isfinite(rows)
    if spec.at_least is not None:
        wrong |= rows < spec.at_least - slack
    if spec.at_most is not None:
        wrong |= rows > spec.at_most + slack
    if spec.per == "token" and spec.masked:
        wrong &= batch.loss_mask.to(values.device)[:, None]
    if not bool(wrong.any()):
        return
    at = int(wrong.any(dim=1).nonzero()[0])
    sample, token = (at, "") if spec.per == "sequence" else _sequence_of(batch, at)
    raise ContractError(
        f"{origin}: compute returned {spec.name!r} = {rows[at][wrong[at]][0].item()} for sample "
        f"{batch.sample_ids[sample]!r}{token}; {_rule(spec)}. Nothing was trained on it"
    )


def _rule(spec: OutputSpec) -> str:
    bounds = []
    if spec.at_least is not None:
        bounds.append(f"at least {spec.at_least:g}")
    if spec.at_most is not None:
        bounds.append(f"at most {spec.at_most:g}")
    return f"{spec.name} must be {' and '.join(['finite', *bounds])}"


def _sequence_of(batch: TrainBatch, row: int) -> tuple[int, str]:
    """The sequence that a row of the batch belongs to, and its token."""
    bounds: Sequence[int] = batch.cu_seqlens.tolist()
    sequence = int(np.searchsorted(bounds, row, side="right")) - 1
    return sequence, f", token {row - bounds[sequence]}"
