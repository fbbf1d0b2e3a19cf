"""Selects the rollouts for a report, and converts them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from chatlearn_observe.report.run_files import RolloutFile, read_lines
from chatlearn_observe.report.tokens import Decode, TokenTexts

MAX_TOKENS = 1_000_000
"""Largest number of completion tokens in a report: about 25 MB of HTML with three numbers per token."""
_SAMPLES_PER_FILE = 16
"""A step is omitted rather than shown with fewer samples than this."""
_TOKEN_DATA = ("generator_logprobs", "trainer_logprobs", "reference_logprobs", "advantages")
_DIGITS = 4
_MANY_TOKENS = 1 << 31
"""Larger than any vocabulary; larger ids are damaged, and tokenizers accept at most 32 bits."""


@dataclass(slots=True)
class RolloutData:
    """Data for the browser of rollouts."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    """Common fields of the samples of one prompt: ``id, kind, step, source, prompt, truth``."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """One entry per sample: ``group`` is an index, ``tokens`` are indices into ``pieces``, or token ids if that is
    None."""
    pieces: list[str] | None = None
    left_out: str = ""
    """How many recorded samples the report omits; empty if none."""


def collect_rollouts(
    files: Sequence[RolloutFile], max_rollouts: int, decode: Decode | None, notes: list[str]
) -> RolloutData:
    """Read at most ``max_rollouts`` samples, spread evenly over steps, whole groups first.

    Only files with shown samples are read. Long completions reduce the number further (``MAX_TOKENS``).
    """
    sizes = {file: _num_lines(file, notes) for file in files}
    chosen = choose_files([file for file in files if sizes[file]], list(filter(None, sizes.values())), max_rollouts)
    shares = dict(zip(chosen, shared_out([sizes[file] for file in chosen], max_rollouts), strict=True))
    data = RolloutData()
    texts = TokenTexts(decode) if decode else None
    num_tokens = 0
    token_share = MAX_TOKENS / max(1, len(chosen))
    for place, file in enumerate(chosen, start=1):
        for members in _whole_groups(file, shares[file], notes):
            lengths = sum(len(_listed(record, "token_ids")) for record in members)
            if num_tokens and num_tokens + lengths > place * token_share:
                break
            num_tokens += lengths
            _add_group(data, file, members, texts)
    data.pieces = texts.pieces if texts else None
    total = sum(sizes.values())
    if len(data.samples) < total:
        steps = len({(group["kind"], group["step"]) for group in data.groups})
        data.left_out = (
            f"{len(data.samples)} of {total} recorded samples are in this report, "
            f"from {steps} of {len(files)} training steps and evaluations."
        )
    return data


def choose_files(files: Sequence[RolloutFile], sizes: Sequence[int], max_rollouts: int) -> list[RolloutFile]:
    """Return the files with shown samples: all if each can get enough, else evenly spaced ones, including first and
    last.
    """
    if sum(sizes) <= max_rollouts:
        return list(files)
    fair = min(_SAMPLES_PER_FILE, math.ceil(sum(sizes) / len(sizes)))
    room = min(len(files), max_rollouts // fair or min(1, max_rollouts))
    if room <= 1:
        return list(files[-room:]) if room else []
    return [files[round(i * (len(files) - 1) / (room - 1))] for i in range(room)]


def shared_out(sizes: Sequence[int], budget: int) -> list[int]:
    """Divide ``budget`` evenly by ``sizes``; small entries leave the rest to others. ``([2, 9, 9], 12)`` gives ``[2, 5,
    5]``.
    """
    shares = [0] * len(sizes)
    left = budget
    for done, index in enumerate(sorted(range(len(sizes)), key=lambda i: (sizes[i], i))):
        shares[index] = min(sizes[index], left // (len(sizes) - done))
        left -= shares[index]
    return shares


def _whole_groups(file: RolloutFile, share: int, notes: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the first groups of a file that fit into its share; a first group that is too large is truncated."""
    taken = 0
    for _, members in groupby(read_lines(file.path, notes), key=lambda record: record.get("group")):
        group = list(members)[: share if not taken else None]
        if not group or taken + len(group) > share:
            return
        taken += len(group)
        yield group


def _add_group(
    data: RolloutData, file: RolloutFile, members: Sequence[dict[str, Any]], texts: TokenTexts | None
) -> None:
    first = members[0]
    group = len(data.groups)
    data.groups.append(
        {
            "id": first.get("group"),
            "kind": file.kind,
            "step": file.step,
            "source": first.get("data_source"),
            "prompt": _text(first, "prompt"),
            "truth": first.get("ground_truth"),
        }
    )
    for record in members:
        ids = [token for token in _listed(record, "token_ids") if type(token) is int and 0 <= token < _MANY_TOKENS]
        data.samples.append(
            {
                "id": record.get("id"),
                "group": group,
                "text": _text(record, "completion"),
                "finish": record.get("finish_reason"),
                "reward": record.get("reward"),
                "parts": parts if isinstance(parts := record.get("reward_components"), dict) else {},
                "error": record.get("reward_error"),
                "excluded": record.get("excluded"),
                "tokens": texts.indices(ids) if texts else ids,
                **{name: _compact(values) for name in _TOKEN_DATA if (values := _listed(record, name))},
            }
        )


def _listed(record: dict[str, Any], name: str) -> list[Any]:
    """Return the list under a name; empty if a damaged record has something else there."""
    value = record.get(name)
    return value if isinstance(value, list) else []


def _text(record: dict[str, Any], name: str) -> str | None:
    value = record.get(name)
    return value if value is None or isinstance(value, str) else str(value)


def _compact(values: Sequence[Any]) -> list[Any] | Any:
    """Round values; return a single number if all tokens have the same, as for GRPO's advantages."""
    rounded = [round(value, _DIGITS) if isinstance(value, float) else value for value in values]
    return rounded[0] if len(set(map(repr, rounded))) == 1 else rounded


def _num_lines(file: RolloutFile, notes: list[str]) -> int:
    try:
        with file.path.open("rb") as stream:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 20), b""))
    except OSError as error:
        notes.append(f"{file.path.name} cannot be read: {error.strerror or error}")
        return 0
