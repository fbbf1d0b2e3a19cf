"""The page in a real browser, headless: what its scripts draw and filter."""

from __future__ import annotations

import html
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from chatlearn_observe.report import write_report

Browse = Callable[..., str]
pytestmark = pytest.mark.slow


@pytest.fixture
def report(run_dir: Path, characters: None) -> Path:
    return write_report(run_dir).path


def listed(dom: str) -> list[str]:
    """Keys of the rollouts in the list."""
    return re.findall(r'data-key="([^"]*)"', dom)


def test_curves_and_times_are_drawn(report: Path, chromium: Browse) -> None:
    dom = chromium(report)
    assert 'data-ready="true"' in dom  # the script ran to its end
    drawn = dict(re.findall(r'<figure class="card chart" data-metric="([^"]+)".*?aria-label="([^"]*)"', dom, re.S))
    assert list(drawn)[:3] == ["reward", "eval/accuracy", "eval/reward"]
    assert len(drawn) == 14
    assert drawn["eval/accuracy"].startswith("Held-out accuracy, steps 0 to 6: from 0.31 to 0.3825")
    paths = re.findall(r'<path class="curve" d="(M[^"]*)"', dom)
    assert len(paths) == 14
    assert paths[0].count("L") == 5  # six steps
    assert dom.count('class="not-finite"') == 1  # the gradient norm of step 5
    assert dom.count('<g class="bar"') == 6
    assert "<title>sums &lt;grpo&gt; · ChatLearn report</title>" in dom


def test_filters_come_from_the_address(report: Path, chromium: Browse) -> None:
    assert len(listed(chromium(report))) == 78
    keys = listed(chromium(report, "#rollouts?kind=step&step=3&text=boxed%7B24&source=sums"))
    # Step 3, prompt 1 (21 + 3 = 24), right where (step + prompt + index) % 3 == 0.
    assert keys == ["step:3:train/1@3#2"]


def test_reward_range_order_and_exclusion(report: Path, chromium: Browse) -> None:
    right = listed(chromium(report, "#rollouts?kind=step&step=1&min=0.5"))
    assert right == [f"step:1:train/{p}@1#{i}" for p in range(3) for i in range(4) if (1 + p + i) % 3 == 0]
    dom = chromium(report, "#rollouts?excluded=1")
    assert listed(dom) == ["step:4:train/0@4#1"]
    assert "The reward failed: ValueError: no number" in dom
    assert "excluded: reward failed" in dom
    assert "No rollout matches" in chromium(report, "#rollouts?text=nothing-like-this")


def test_a_sample_its_tokens_and_its_group(report: Path, chromium: Browse) -> None:
    dom = chromium(report, "#rollouts?step=2&sample=step%3A2%3Atrain%2F1%402%231&colour=advantage")
    detail = dom[dom.index('id="detail"') : dom.index('id="events"')]
    tokens = re.findall(r'<span class="token( warm| cool)?" data-i="(\d+)"[^>]*>(.)</span>', detail)
    assert "".join(character for _, _, character in tokens) == "21 plus 2 is \\boxed{1}"
    assert {colour for colour, _, _ in tokens} == {" warm"}  # a wrong answer: negative advantage
    assert detail.count('class="member') == 4
    assert detail.count('class="member current"') == 1
    assert "format" in detail


def test_hostile_completions_are_shown_and_not_run(report: Path, chromium: Browse) -> None:
    dom = chromium(report, "#rollouts?sample=step%3A2%3Atrain%2F1%402%232&colour=none")
    assert "<title>stolen" not in dom
    assert "&lt;/script&gt;&lt;script&gt;document.title='stolen'" in dom
    assert dom.count("<script") == 2


def test_smoothing_and_further_metrics(report: Path, chromium: Browse) -> None:
    dom = chromium(report, "#curves?smooth=0.5&metrics=timing_s%2Fgenerate%2Cno_such_metric")
    assert '<output id="smooth-value" for="smooth">0.5</output>' in dom
    assert 'data-metric="timing_s/generate"' in dom
    assert "no_such_metric" not in dom
    assert 'class="curve faint"' in dom


@pytest.mark.parametrize(("width", "scheme"), [(1400, 1), (500, 0)])
def test_it_can_be_looked_at(report: Path, chromium: Browse, tmp_path: Path, width: int, scheme: int) -> None:
    picture = tmp_path / "page.png"
    chromium(
        report,
        "",
        f"--window-size={width},2000",
        f"--blink-settings=preferredColorScheme={scheme}",
        action=f"--screenshot={picture}",
    )
    header = picture.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert struct.unpack(">II", header[16:24]) == (width, 2000)
    assert picture.stat().st_size > 40_000  # an empty page of that size has less than a quarter


def act(report: Path, chromium: Browse, script: str, width: int = 1000) -> str:
    """Runs a script on the report (``page`` is its document) and gives what it returns."""
    frame = report.parent / "frame.html"
    frame.write_text(
        f'<iframe src="{report.name}" width="{width}" height="900"></iframe><p id="seen"></p><script>'
        f"const act = (page) => {{ {script} }};"
        "onload = () => setTimeout(() => {"
        " document.getElementById('seen').textContent = String(act(frames[0].document)) }, 800)</script>",
        encoding="utf-8",
    )
    dom = chromium(frame, "", "--allow-file-access-from-files")
    return html.unescape(dom[dom.index('id="seen">') + 10 : dom.index("</p>")])


@pytest.mark.parametrize("width", [340, 700, 1200])
def test_no_width_makes_the_page_scroll_sideways(report: Path, chromium: Browse, width: int) -> None:
    script = "const root = page.documentElement; return root.scrollWidth + ' of ' + root.clientWidth"
    seen = act(report, chromium, script, width)
    assert seen == f"{width} of {width}"


def press(selector: str, *keys: str) -> str:
    pressed = "".join(f"node.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}));" for key in keys)
    return f"const node = page.querySelector('{selector}'); {pressed}"


def test_a_curve_is_read_with_the_keyboard(report: Path, chromium: Browse) -> None:
    script = press('[data-metric="policy/grad_norm"] svg', *["ArrowRight"] * 5)
    script += "return page.querySelector('[data-metric=\"policy/grad_norm\"] .readout').textContent"
    assert act(report, chromium, script) == "step 5: nan"


def test_a_bar_is_read_with_the_keyboard(report: Path, chromium: Browse) -> None:
    script = press("#time-chart svg", "End") + "return page.querySelector('.time-readout').textContent"
    seen = act(report, chromium, script)
    assert seen.startswith("step 6: 1.05 s = generate 399.0 ms, compute/reference 80.0 ms")
    assert "reward 250.0 ms (meanwhile)" in seen


def test_the_time_line_is_drawn_and_read_with_the_keyboard(
    async_run_dir: Path, characters: None, chromium: Browse
) -> None:
    report = write_report(async_run_dir).path
    script = press("#timeline-chart svg", "ArrowRight", "ArrowRight") + (
        "const count = (kind) => page.querySelectorAll('#timeline-chart rect.' + kind).length;"
        "return [page.querySelector('#timeline-chart .time-readout').textContent, count('updating'), count('sampling'),"
        " count('sync-band'), page.querySelectorAll('#staleness-chart rect').length].join(' | ')"
    )
    text = "step 2: 4.00 s; trainer: updates 2.00 s, waiting 1.00 s, weight sync 500.0 ms; replicas sampled 75% of the "
    # Six steps: an interval of updates and a sync each, one and two of the two replicas.
    assert act(report, chromium, script) == text + "time (50% to 100%) | 6 | 18 | 6 | 2"


def test_a_token_is_read_with_the_keyboard(report: Path, chromium: Browse) -> None:
    script = press(".tokens", "ArrowRight", "ArrowRight")
    script += "return page.querySelector('.token-readout').textContent"
    # The first rollout is of the evaluation before training: "20 plus 0 ...", second logprob -0.05 - 7 * 0.4.
    assert act(report, chromium, script) == 'token 2 of 23: "0"  p 0.05784  generator -2.85'


def test_typing_filters_and_the_address_follows(report: Path, chromium: Browse) -> None:
    script = (
        "const form = page.getElementById('filters');"
        "form.elements.kind.value = 'eval'; form.elements.text.value = '26';"
        "form.dispatchEvent(new Event('input'));"
        "return page.getElementById('matches').textContent + ' ' + page.location.hash"
    )
    # Evaluations of three prompts at steps 0 and 6: 20 + 6 = 26 is the answer to one of them.
    assert act(report, chromium, script) == "1 of 78 rollouts #rollouts?kind=eval&text=26"


def test_a_step_that_was_left_out_is_said_to_be(report: Path, chromium: Browse) -> None:
    script = (
        "page.location.hash = '#rollouts?step=77'; page.defaultView.dispatchEvent(new Event('hashchange'));"
        "return page.getElementById('filters').elements.step.selectedOptions[0].textContent"
    )
    assert act(report, chromium, script) == "77 (not in this report)"
