"""A filter that normalises rewards by the mean and standard deviation of all rewards seen so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.protocols import SampleFilter
from chatlearn_core.types import RewardResult, Sample
from chatlearn_rewards.normalisation_options import NormalisationOptions

AS_SCORED = "as_scored"
"""Component that holds the reward before it was normalised."""
_ALL = ""
"""Key of the moments of all data sources together."""


@dataclass(slots=True, frozen=True)
class Moments:
    """Number, mean and sum of squared differences from the mean of a stream of numbers, in float64."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_values(self, values: Sequence[float]) -> Moments:
        """Those of the stream and these values behind it: T. F. Chan, G. H. Golub, R. J. LeVeque, Updating formulae and
        a pairwise algorithm for computing sample variances, 1979.
        """
        if not values:
            return self
        array = np.asarray(values, np.float64)
        mean = float(array.mean())
        squares = float(np.square(array - mean).sum())
        count = self.count + len(array)
        difference = mean - self.mean
        return Moments(
            count,
            self.mean + difference * len(array) / count,
            self.squares + squares + difference * difference * self.count * len(array) / count,
        )

    @property
    def std(self) -> float:
        """Population standard deviation; 0 of nothing."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class RunningNormalisation(SampleFilter):
    """(r - mean) / (std + epsilon), with the moments of all rewards up to and including those of the step.

    Rewards of tokens and steps are divided by the same standard deviation, which is that of the completions' own
    rewards; while it is 0, they stay as they are. The state is in checkpoints, as JSON numbers, which float64 survives.
    """

    def __init__(self, options: NormalisationOptions) -> None:
        self.options = options
        self.moments: dict[str, Moments] = {}

    def excluded(self, samples: Sequence[Sample]) -> Mapping[str, str]:
        """None."""
        return {}

    def rewards(self, samples: Sequence[Sample]) -> Mapping[str, RewardResult]:
        scored = [(one, one.reward) for one in samples if one.reward is not None and one.reward.value is not None]
        values: dict[str, list[float]] = {}
        for sample, reward in scored:
            assert reward.value is not None, "chosen so"
            values.setdefault(self._key(sample), []).append(reward.value)
        for key, of_key in values.items():
            self.moments[key] = self.moments.get(key, Moments()).with_values(of_key)
        return {sample.id: self._normalised(reward, self.moments[self._key(sample)]) for sample, reward in scored}

    def state_dict(self) -> dict[str, Any]:
        moments = {key: [one.count, one.mean, one.squares] for key, one in self.moments.items()}
        return {"per_data_source": self.options.per_data_source, "moments": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            per_data_source, stored = state["per_data_source"], state["moments"]
            moments = {
                str(key): Moments(int(count), float(mean), float(squares))
                for key, (count, mean, squares) in stored.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of running_normalisation is damaged: {type(error).__name__}: {error}"
            ) from error
        if per_data_source != self.options.per_data_source:
            raise CheckpointError(
                f"the checkpoint has moments with per_data_source={str(per_data_source).lower()}, and the "
                f"option is {str(self.options.per_data_source).lower()}. Restore it"
            )
        self.moments = moments

    def _key(self, sample: Sample) -> str:
        return sample.prompt.data_source if self.options.per_data_source else _ALL

    def _normalised(self, reward: RewardResult, moments: Moments) -> RewardResult:
        assert reward.value is not None, "rewards with errors are left out"
        options, scale = self.options, moments.std + self.options.epsilon
        value = (reward.value - (moments.mean if options.centre else 0.0)) / (scale if moments.std else 1.0)
        if options.clip is not None:
            value = max(-options.clip, min(options.clip, value))
        tokens = reward.token_values
        if tokens is not None and moments.std:
            tokens = (np.asarray(tokens, np.float64) / scale).astype(np.float32)
        components = {**reward.components, AS_SCORED: reward.value}
        return replace(reward, value=value, components=components, token_values=tokens)
