from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from chatlearn_core.types import cumulative_lengths
from chatlearn_losses.logprobs import prediction_rows, token_logprobs, token_logprobs_from_hidden

NUM_TOKENS, VOCABULARY, HIDDEN = 7, 11, 5


def tensors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    return hidden, weight, torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)


def plain(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's own cross-entropy, and the entropy's definition."""
    scaled = logits / temperature
    log_probs = scaled.log_softmax(-1)
    return -cross_entropy(scaled, labels, reduction="none"), -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logits_against_plain_torch(chunk_tokens, temperature):
    hidden, weight, labels = tensors()
    logits = (hidden @ weight.T).requires_grad_()
    upstream = torch.linspace(-1, 2, NUM_TOKENS, dtype=torch.float64)

    scored = token_logprobs(logits, labels, temperature=temperature, chunk_tokens=chunk_tokens, with_entropy=True)
    expected_logprobs, expected_entropy = plain(logits, labels, temperature)
    torch.testing.assert_close(scored.logprobs, expected_logprobs)
    torch.testing.assert_close(scored.entropy, expected_entropy)
    (gradient,) = torch.autograd.grad((upstream * scored.logprobs + upstream.flip(0) * scored.entropy).sum(), logits)
    (expected,) = torch.autograd.grad(
        (upstream * expected_logprobs + upstream.flip(0) * expected_entropy).sum(), logits
    )
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck(with_entropy):
    hidden, weight, labels = tensors()

    def of_logits(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scored = token_logprobs(logits, labels, temperature=0.8, chunk_tokens=3, with_entropy=with_entropy)
        return tuple(part for part in scored if part is not None)

    assert torch.autograd.gradcheck(of_logits, ((hidden @ weight.T).requires_grad_(),))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("chunk_tokens", [2, 7, 100])
@pytest.mark.parametrize("as_module", [True, False])
def test_hidden_against_plain_torch(recompute, chunk_tokens, as_module):
    hidden, weight, labels = tensors()
    hidden.requires_grad_()
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
    head.weight.data.copy_(weight)
    upstream = torch.linspace(-1, 2, NUM_TOKENS, dtype=torch.float64)

    scored = token_logprobs_from_hidden(
        hidden,
        head if as_module else head.weight,
        labels,
        temperature=0.7,
        chunk_tokens=chunk_tokens,
        with_entropy=True,
        recompute=recompute,
    )
    expected_logprobs, expected_entropy = plain(hidden @ head.weight.T, labels, 0.7)
    torch.testing.assert_close(scored.logprobs, expected_logprobs)
    torch.testing.assert_close(scored.entropy, expected_entropy)
    wrt = (hidden, head.weight)
    gradients = torch.autograd.grad((upstream * scored.logprobs - scored.entropy).sum(), wrt)
    expected = torch.autograd.grad((upstream * expected_logprobs - expected_entropy).sum(), wrt)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference)


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation's result has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, torch.Tensor):
                self.elements = max(self.elements, part.numel())
        return result


def test_logits_are_never_whole():
    hidden = torch.randn(40, 3, requires_grad=True)
    weight = torch.randn(50, 3, requires_grad=True)
    labels = torch.randint(50, (40,))
    with LargestTensor() as largest:
        scored = token_logprobs_from_hidden(
            hidden, weight, labels, chunk_tokens=8, with_entropy=True, kept_ids=labels[:, None]
        )
        (scored.logprobs.sum() + scored.entropy.sum() + scored.truncated.sum()).backward()
    # One chunk of logits is 8 x 50; all of them would be 2000 elements.
    assert largest.elements == 400


def test_hidden_states_pass_gradcheck_in_all_outputs():
    """Chunks recomputed in the backward pass, against finite differences: states and weight, every output."""
    hidden, weight, labels = tensors()
    ids = torch.tensor([[0, 3], [1, 1], [10, 2], [4, 5], [9, 0], [7, 8], [6, 6]])
    kept = torch.stack([labels, (labels + 1) % 11, torch.full_like(labels, -1)], dim=1)

    def outputs(rows: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scored = token_logprobs_from_hidden(
            rows,
            matrix,
            labels,
            temperature=0.8,
            chunk_tokens=3,
            with_entropy=True,
            top_k=3,
            selected_ids=ids,
            kept_ids=kept,
        )
        assert scored.topk_ids is not None
        return tuple(part for name, part in scored._asdict().items() if name != "topk_ids")

    assert torch.autograd.gradcheck(outputs, (hidden.requires_grad_(), weight.requires_grad_()))


class Calls(TorchDispatchMode):
    """Counts the operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_the_backward_pass_recomputes_the_head_but_no_softmax():
    hidden, weight, labels = tensors()
    hidden.requires_grad_()
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
    head.weight.data.copy_(weight)
    with Calls() as forward:
        scored = token_logprobs_from_hidden(hidden, head, labels, chunk_tokens=3, with_entropy=True)
    with Calls() as backward:
        scored.logprobs.sum().backward()
    assert forward.counts["logsumexp"] == forward.counts["special_entr"] == 3
    assert backward.counts["logsumexp"] == 0
    assert backward.counts["special_entr"] == 0, "nothing asked for the gradient of the entropy"
    assert backward.counts["mm"] == 3 * 3, "the head again, and the gradients of states and weight, a chunk each"


def peak_bytes(step: Callable[[], object], file: Path) -> int:
    """How far the memory of tensors rose over what was held before, by torch's own profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    profiler.export_chrome_trace(str(file))
    events = [event["args"] for event in json.loads(file.read_text())["traceEvents"] if event["name"] == "[memory]"]
    held = events[0]["Total Allocated"] - events[0]["Bytes"]
    return max(event["Total Allocated"] for event in events) - held


def test_peak_memory_is_a_few_chunks(tmp_path):
    tokens, vocabulary = 512, 4096
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))

    def chunked() -> None:
        scored = token_logprobs_from_hidden(hidden, weight, labels, chunk_tokens=32, with_entropy=True)
        (scored.logprobs.sum() + scored.entropy.sum()).backward()

    def whole() -> None:
        (hidden @ weight.T).log_softmax(-1).gather(-1, labels[:, None]).sum().backward()

    logits = tokens * vocabulary * 4
    chunk = logits / 16
    assert peak_bytes(whole, tmp_path / "whole.json") > 2 * logits
    assert peak_bytes(chunked, tmp_path / "chunked.json") < 6 * chunk


def test_half_precision_logits_are_scored_in_float32():
    hidden, weight, labels = tensors(torch.float32)
    logits = (hidden @ weight.T).bfloat16().requires_grad_()
    scored = token_logprobs(logits, labels, chunk_tokens=4, with_entropy=True)
    expected, entropy = plain(logits.detach().float(), labels, 1.0)
    assert scored.logprobs.dtype == torch.float32
    torch.testing.assert_close(scored.logprobs, expected)
    torch.testing.assert_close(scored.entropy, entropy)
    scored.logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_excluded_vocabulary_entries():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], requires_grad=True)
    scored = token_logprobs(logits, torch.tensor([0]), with_entropy=True)
    torch.testing.assert_close(scored.logprobs, -torch.tensor([2.0]).log())
    torch.testing.assert_close(scored.entropy, torch.tensor([2.0]).log())
    (scored.logprobs + scored.entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, 0.0, -0.5]]))


def test_no_rows_stay_connected():
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    weight = torch.zeros(VOCABULARY, HIDDEN, requires_grad=True)
    scored = token_logprobs_from_hidden(hidden, weight, torch.zeros(0, dtype=torch.int64), with_entropy=True)
    assert scored.logprobs.shape == scored.entropy.shape == (0,)
    scored.logprobs.sum().backward()
    assert weight.grad.abs().sum() == 0


def test_entropy_only_on_request():
    hidden, weight, labels = tensors()
    assert token_logprobs(hidden @ weight.T, labels).entropy is None


@given(
    lengths=st.lists(st.integers(0, 5), max_size=6),
    chunk_tokens=st.integers(1, 8),
    data=st.data(),
)
def test_packed_rows_score_what_each_sequence_scores_alone(lengths, chunk_tokens, data):
    num_tokens = sum(lengths)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)), dtype=torch.bool)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_tokens, VOCABULARY, generator=generator)
    tokens = torch.randint(VOCABULARY, (num_tokens,), generator=generator)

    rows, targets = prediction_rows(cumulative_lengths(lengths), mask)
    scored = token_logprobs(logits[rows], tokens[targets], chunk_tokens=chunk_tokens)
    packed = torch.zeros(num_tokens).index_copy(0, targets, scored.logprobs)

    start = 0
    for length in lengths:
        for t in range(length):
            at = start + t
            alone = logits[at - 1].log_softmax(-1)[tokens[at]] if t and mask[at] else torch.tensor(0.0)
            torch.testing.assert_close(packed[at], alone)
        start += length


def test_all_predictions_without_a_mask():
    rows, targets = prediction_rows(cumulative_lengths([3, 1, 2]))
    assert (rows.tolist(), targets.tolist()) == ([0, 1, 4], [1, 2, 5])
