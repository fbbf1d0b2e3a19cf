"""The contract of a generator's draws: each follows its own request's distribution, and the seed alone decides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chatlearn_core.types import RAW_BASIS
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.fakes.sampling import basis_logprobs
from chatlearn_testing.stress import seeds
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.generator_fixtures import (
    FEW_TOKENS,
    LONG,
    NUM_TOKENS,
    PROMPTS,
    GeneratorFixtures,
    Replica,
    ask,
    assert_completion,
    assert_logprobs,
    plain_logits,
)

MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.9, "top_k": 3},
    {"temperature": 1.9, "top_p": 0.3},
    {"temperature": 1.8, "top_k": 7, "top_p": 0.7},
)
"""High temperatures give the least likely of the kept tokens a large share, so that its absence shows. Some engines
refuse more than 2."""
SUCCESSIVE: dict[str, Any] = {"temperature": 2.0, "top_k": 3}
NUM_DRAWS = 150
"""Draws per setting."""
MIN_EXPECTED = 8.0
"""Fewest expected draws per bin of a chi-square test; rarer tokens share a bin."""
MIN_P_VALUE = 1e-6
"""A correct sampler falls below it once in a million seeds."""
NEAR = (2e-3, 0.15)
"""Difference of the two highest logits at a near tie: well above the error of float32, far below a usual difference."""
LOW_TEMPERATURES = (0.08, 0.04, 0.02)
"""Some engines take a temperature below 0.01 for 0.01."""
LARGEST_SHARE = 2.5
"""Largest difference of logits over the temperature at which both tokens are drawn: the second with 8%."""


class SamplingContract(GeneratorFixtures, ConformanceSuite):
    """The part of ``GeneratorConformance`` about what is drawn."""

    def test_draws_of_a_mixed_batch_follow_each_requests_distribution(
        self, replica: Replica, reference: torch.nn.Module
    ) -> None:
        """Requests with other temperatures, top-k and top-p in one batch: the first draws of each follow its own
        distribution (chi-square), and so do their logprobs.

        Correct logprobs and a wrong distribution: the sampler truncates or scales otherwise than the logprobs say.
        """
        asked = [
            (number, ask(f"mixed-{number}-{seed}", max_tokens=2, seed=seed, **settings))
            for seed in seeds(NUM_DRAWS)
            for number, settings in enumerate(MIXED)
        ]
        logits = plain_logits(reference, PROMPTS[0], [0])[0]
        drawn: list[list[int]] = [[] for _ in MIXED]
        for (number, request), completion in zip(asked, replica.ask(*(one for _, one in asked)), strict=True):
            drawn[number].append(token := int(completion.token_ids[0]))
            assert completion.basis in (RAW_BASIS, request.sampling.basis)
            expected = basis_logprobs(logits, completion.basis)[token]
            assert_logprobs(completion.logprobs[:1], expected[None], completion)
        for settings, tokens in zip(MIXED, drawn, strict=True):
            basis = ask("basis", **settings).sampling.basis
            assert_follows(tokens, basis_logprobs(logits, basis).exp(), f"{settings}")

    def test_successive_tokens_are_drawn_independently(self, replica: Replica, reference: torch.nn.Module) -> None:
        """The first two tokens together have the product of their distributions (chi-square).

        Some pairs never occur: both tokens are drawn with the same random number.
        """
        requests = [ask(f"pair-{seed}", max_tokens=2, seed=seed, **SUCCESSIVE) for seed in seeds(NUM_DRAWS)]
        basis = requests[0].sampling.basis
        first = basis_logprobs(plain_logits(reference, PROMPTS[0], [0])[0], basis).exp()
        kept = [int(token) for token in first.nonzero().flatten()]
        seconds = [basis_logprobs(plain_logits(reference, PROMPTS[0], [token, 0])[1], basis).exp() for token in kept]
        size = len(first)
        joint = torch.zeros(size * size, dtype=torch.double)
        for token, second in zip(kept, seconds, strict=True):
            joint[token * size : (token + 1) * size] = first[token] * second
        pairs = [completion.token_ids.tolist() for completion in replica.ask(*requests)]
        assert_follows([a * size + b for a, b in pairs], joint, "pairs of tokens")

    def test_near_ties_are_decided_as_asked(self, replica: Replica, reference: torch.nn.Module) -> None:
        """Where two tokens are almost equally likely, temperature 0 takes the more likely one, and a low temperature
        draws both.

        One token only: the generator rounds low temperatures to 0.
        """
        ties = near_ties(reference)
        if not ties:
            not_applicable("the suite found no prompt of this model with a near tie")
        greedy = [ask(f"tie-{i}", prompt, max_tokens=1) for i, prompt in enumerate(ties)]
        temperatures = self._low_temperatures(reference, ties[0])
        low = [
            ask(f"low-{t}-{s}", ties[0], max_tokens=1, temperature=t, seed=s)
            for t in temperatures
            for s in seeds(NUM_DRAWS)
        ]
        found = replica.ask(*greedy, *low)
        for request, completion in zip(greedy, found, strict=False):
            expected = int(plain_logits(reference, request.prompt_ids.tolist(), [0])[0].argmax())
            assert completion.token_ids.tolist() == [expected], f"{request.id}: not the most likely token"
        for number, temperature in enumerate(temperatures):
            count = len(seeds(NUM_DRAWS))
            basis = low[number * count].sampling.basis
            distribution = basis_logprobs(plain_logits(reference, ties[0], [0])[0], basis).exp()
            first = len(greedy) + number * count
            drawn = [int(completion.token_ids[0]) for completion in found[first : first + count]]
            assert_follows(drawn, distribution, f"temperature {temperature}")

    def _low_temperatures(self, reference: torch.nn.Module, tie: list[int]) -> list[float]:
        """Return the low temperatures at which the second token of a near tie is drawn often enough to be seen."""
        two = plain_logits(reference, tie, [0])[0].double().topk(2).values
        gap = float(two[0] - two[1])
        return [t for t in LOW_TEMPERATURES if gap / t <= LARGEST_SHARE] or [LOW_TEMPERATURES[0]]

    def test_members_of_a_group_differ(self, replica: Replica, reference: torch.nn.Module) -> None:
        """Requests of one group have seeds of their own, and so completions of their own.

        Equal completions: random numbers are keyed by the group or the prompt. Their advantages would all be 0.
        """
        settings: dict[str, Any] = {"temperature": 1.5, "group_id": "group"}
        requests = [ask(f"member-{seed}", seed=seed, **settings) for seed in range(6)]
        completions = replica.ask(*requests)
        for request, completion in zip(requests, completions, strict=True):
            assert_completion(reference, request, completion)
        different = {tuple(completion.token_ids.tolist()) for completion in completions}
        assert len(different) >= 5, f"6 members of a group have {len(different)} different completions"

    def test_the_seed_alone_decides(self, replica: Replica) -> None:
        """Ids, groups and the limit of tokens change no draw; each of the seed's lower 32 bits does.

        Torch's generator of the CPU takes no more of them.
        """
        if not self.record().seeded:
            not_applicable("the record does not declare 'seeded'")
        seed = 2**31 + 7
        same = [
            ask("one", temperature=1.0, seed=seed),
            ask("two", temperature=1.0, seed=seed, group_id="group"),
            ask("three", temperature=1.0, seed=seed, group_id="other", max_tokens=LONG),
        ]
        others = [7, 2**31 + 6, 2**31 + 8, 2**31 + 2**20 + 7, 2**31 + 2**12 + 7]
        found = [
            tuple(completion.token_ids[:NUM_TOKENS].tolist())
            for completion in replica.ask(*same, *(ask(f"s{s}", temperature=1.0, seed=s) for s in others))
        ]
        assert len(set(found[:3])) == 1, "equal seeds gave other tokens to another id, group or max_tokens"
        assert len(set(found[2:])) == 1 + len(others), "different seeds gave equal tokens: a part is ignored"


def near_ties(reference: torch.nn.Module, most: int = 8) -> list[list[int]]:
    """Return prompts after which the two most likely tokens are almost equally likely, nearest first."""
    random = torch.Generator().manual_seed(0)
    found: dict[float, list[int]] = {}
    for _ in range(40):
        tokens = torch.randint(0, FEW_TOKENS, (32,), generator=random)
        with torch.no_grad():
            highest = reference(tokens).double().topk(2, dim=-1).values
        for length, gap in enumerate((highest[:, 0] - highest[:, 1]).tolist(), 1):
            if NEAR[0] <= gap <= NEAR[1]:
                found.setdefault(gap, tokens[:length].tolist())
    return [found[gap] for gap in sorted(found)[:most]]


def assert_follows(drawn: Sequence[int], probabilities: Tensor, what: str) -> None:
    """Check with a chi-square test that draws come from [V] probabilities, and that none has probability 0."""
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probabilities)).double()
    outside = [int(token) for token in counts.nonzero().flatten() if probabilities[int(token)] == 0]
    assert not outside, f"{what}: drew {outside}, which the distribution excludes"
    expected = probabilities * len(drawn)
    bins: list[tuple[float, float]] = []
    count = mass = 0.0
    for token in expected.argsort(descending=True).tolist():
        count, mass = count + float(counts[token]), mass + float(expected[token])
        if mass >= MIN_EXPECTED:
            bins.append((count, mass))
            count = mass = 0.0
    if bins:
        bins[-1] = (bins[-1][0] + count, bins[-1][1] + mass)
    assert len(bins) > 1, f"{what}: one token has nearly all the probability; the suite needs a less certain model"
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in bins)
    freedom = torch.tensor((len(bins) - 1) / 2, dtype=torch.double)
    p_value = float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.double)))
    assert p_value >= MIN_P_VALUE, (
        f"{what}: {len(drawn)} draws do not follow the stated distribution: chi-square {statistic:.1f} with "
        f"{len(bins) - 1} degrees of freedom, p {p_value:.1e}; (draws, expected) by bin: "
        + ", ".join(f"({seen:.0f}, {mean:.1f})" for seen, mean in bins)
    )
