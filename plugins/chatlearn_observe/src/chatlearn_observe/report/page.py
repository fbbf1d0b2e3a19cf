"""Assembles a report from ``assets/``: a template, styles and scripts, in one file.

The page needs no network, and its content security policy forbids access: only the styles and scripts of this package
run, identified by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import statistics
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from chatlearn_observe import __version__
from chatlearn_observe.report.overview import duration, short_duration

_ASSETS = files("chatlearn_observe.report") / "assets"
_SCRIPTS = (
    "dom.js",
    "state.js",
    "chart.js",
    "curves.js",
    "step_time.js",
    "timeline.js",
    "tokens.js",
    "rollouts.js",
    "main.js",
)
"""Scripts in order of dependence; they are joined in one function and share no globals."""


def render_page(**content: Any) -> str:
    """Return the page as text; everything in ``content`` is escaped."""
    script = '(() => {\n"use strict";\n' + "".join(_asset(name) for name in _SCRIPTS) + "})();\n"
    style = _asset("report.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"duration": duration, "duration_s": short_duration}
    times = content["times"]
    flow = content.pop("flow_svg")
    return environment.from_string(_asset("report.html.j2")).render(
        **content | {"data": Markup(json_for_html(content["data"]))},
        style=Markup(style),
        script=Markup(script),
        policy=policy,
        flow_image=f"data:image/svg+xml;base64,{base64.b64encode(flow.encode()).decode()}" if flow else "",
        version=__version__,
        data_has_metrics=bool(content["data"]["steps"]),
        step_median=statistics.median(times.step_s) if times else 0.0,
        overlap=sum(times.overlap_s) / sum(times.step_s) if times else 0.0,
    )


def json_for_html(data: Any) -> str:
    """Return JSON that is safe inside a ``script`` element: no text in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash by which a content security policy identifies an inline element."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
