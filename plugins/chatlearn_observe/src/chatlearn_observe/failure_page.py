"""``failure.md``: a page about a failed run with the error, its place, earlier events, saved state and how
to continue.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from chatlearn_core.exceptions import BackendError, ChatLearnError, WorkerPlace
from chatlearn_core.printable import printable
from chatlearn_core.types import RunFailure

_MESSAGE_CHARS = 1200
_EVENT_CHARS = 300
_STACK_LINES = 60
_MAX_CAUSES = 6


def failure_page(error: BaseException, failure: RunFailure) -> str:
    """Return the page, in Markdown."""
    chain = list(_causes(error))
    stack = next((e.stack for e in chain if isinstance(e, BackendError) and e.stack), "")
    parts = [
        f"# Run {failure.name!r} failed while {failure.phase}{_of_step(failure)}",
        _headline(error, stack),
        _table(error, failure, _place(chain)),
        f"## How to continue\n\n{failure.kept}\n\n{_go_on(failure)}",
    ]
    if len(chain) > 1 or getattr(error, "__notes__", None):
        parts.append(f"## What caused it\n\n{_cause_list(chain, stack)}")
    if stack:
        parts.append(f"## Where it was, in the worker\n\n```\n{_last_lines(stack)}\n```")
    if not isinstance(error, ChatLearnError):
        text = "".join(traceback.format_exception(error))
        parts.append(
            "## Traceback\n\nChatLearn does not expect this error: it is a bug, here or in a plugin.\n\n"
            f"```\n{_last_lines(text)}\n```"
        )
    parts.append(f"## What happened before\n\n{_event_list(failure.events)}")
    parts.append(f"## Versions\n\n{', '.join(f'{name} {version}' for name, version in failure.versions.items())}")
    return printable("\n\n".join(parts)) + "\n"


def _of_step(failure: RunFailure) -> str:
    return f", step {failure.step} of {failure.planned_steps}" if failure.step else ", before the first step"


def _headline(error: BaseException, stack: str) -> str:
    return _short(_without(str(error), stack).strip() or type(error).__name__)


def _table(error: BaseException, failure: RunFailure, place: WorkerPlace | None) -> str:
    rows = [
        ("when", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, {_duration(failure.wall_s)} after the start"),
        ("phase", f"{failure.phase}, for {_duration(failure.phase_s)}"),
        ("steps", f"{failure.num_complete} of {failure.planned_steps} are complete"),
        ("error", type(error).__name__),
    ]
    if place is not None:
        rows.append(("role", f"{place.role}, {place.worker}" if place.worker else place.role))
        if place.method:
            rows.append(("call", place.method))
        if place.process is not None:
            rows.append(("process", f"{place.process} on {place.host}"))
    rows.append(("run directory", str(failure.run_dir)))
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows)


def _go_on(failure: RunFailure) -> str:
    return (
        "Remove the cause, then run the same command again, or this one from the same directory, with the same "
        "settings:\n\n"
        f"```\nchatlearn run {failure.run_dir / 'config.yaml'}\n```\n\n"
        "Limits of retries and timeouts (`runtime.options.max_*_restarts`, `roles.*.timeout_s`) may be changed in it."
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then its causes, including every member of exception groups."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        current = queue.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, BaseExceptionGroup):
            queue.extend(current.exceptions)
        else:
            yield current
        queue.append(current.__cause__ or (None if current.__suppress_context__ else current.__context__))


def _place(chain: Sequence[BaseException]) -> WorkerPlace | None:
    return next((e.place for e in chain if isinstance(e, BackendError) and e.place is not None), None)


def _cause_list(chain: Sequence[BaseException], stack: str) -> str:
    told: dict[str, BaseException] = {}
    for error in chain:
        told.setdefault(_short(_without(str(error), stack).strip()), error)
    lines: list[str] = []
    for number, (text, error) in enumerate(told.items(), 1):
        if number > _MAX_CAUSES:
            lines.append(f"\nand {len(told) - _MAX_CAUSES} more")
            break
        lines.append(f"{number}. `{type(error).__name__}`: {_indented(text)}")
        lines += [f"   - {_indented(_short(_without(note, stack)))}" for note in getattr(error, "__notes__", ())]
    return "\n".join(lines)


def _event_list(events: Sequence[Mapping[str, Any]]) -> str:
    if not events:
        return "Nothing out of the ordinary."
    return "\n".join(f"- {_event(event)}" for event in events)


def _event(event: Mapping[str, Any]) -> str:
    facts = {name: value for name, value in event.items() if name not in ("time", "event", "text")}
    told = str(event.get("text") or ", ".join(f"{name} {value}" for name, value in facts.items()))
    step = f" (step {facts['step']})" if event.get("text") and facts.get("step") else ""
    return _cell(f"{event['time']} **{event['event']}**{step}: {' '.join(told.split())}", _EVENT_CHARS)


def _without(text: str, stack: str) -> str:
    """Remove the stack from a message, because it has its own section."""
    if not stack.strip():
        return text
    return text.replace(stack.rstrip(), "").replace("It hangs here:", "Where it hangs stands below.").rstrip()


def _short(text: str, limit: int = _MESSAGE_CHARS) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} characters more in events.jsonl)"


def _indented(text: str) -> str:
    return "\n   ".join(text.splitlines())


def _cell(text: str, limit: int = _MESSAGE_CHARS) -> str:
    """Return the text on one line, with characters escaped that would end a table cell."""
    flat = " ".join(text.split()).replace("|", "\\|")
    return flat if len(flat) <= limit else f"{flat[:limit]} ..."


def _last_lines(text: str) -> str:
    lines = text.rstrip().splitlines()
    left_out = [f"... {len(lines) - _STACK_LINES} lines"] if len(lines) > _STACK_LINES else []
    return "\n".join([*left_out, *lines[-_STACK_LINES:]]).replace("```", "'''")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
