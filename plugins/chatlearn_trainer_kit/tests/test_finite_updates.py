from math import inf, nan

import pytest

from chatlearn_trainer_kit.finite_updates import NAMED_SAMPLES, all_finite, refused_update


def test_ranks_agree_on_finite_values() -> None:
    asked = []

    def agree(finding: bool) -> bool:
        asked.append(finding)
        return False

    assert all_finite([1.0, -2.0])
    assert not all_finite([1.0, nan])
    assert not all_finite([1.0], agree)
    assert not all_finite([inf], agree)
    assert asked == [True, False]


@pytest.mark.parametrize(
    ("losses", "norms", "where"),
    [
        ([1.0, nan], [1.0, 1.0], "in the micro-batch of samples c"),
        ([1.0, 2.0], [inf, 1.0], "in the micro-batch of samples a, b"),
        ([1.0, 2.0], [1.0, 1.0], "on another rank, or only in their sum"),
        ([1.0, 2.0], None, "on another rank, or only in their sum"),
    ],
)
def test_the_samples_are_named(losses, norms, where) -> None:
    error = refused_update("trainer role 'policy' rank 0", 7, losses, inf, [["a", "b"], ["c"]], norms)
    assert f"(inf) of optimizer step 7 is not finite, {where}. The weights are unchanged" in str(error)


def test_many_samples_are_cut_short() -> None:
    ids = [f"s{number}" for number in range(NAMED_SAMPLES + 1)]
    text = str(refused_update("trainer role 'policy' rank 0", 0, [nan], 1.0, [ids], None))
    assert f"s{NAMED_SAMPLES - 1}, ...." in text
    assert f"s{NAMED_SAMPLES}" not in text
