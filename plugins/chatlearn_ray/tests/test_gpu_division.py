from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.exceptions import ConfigError
from chatlearn_ray.gpu_division import GpuDemand, divide_gpus


def divide(num_gpus: int, *demands: GpuDemand) -> list[tuple[int, ...]]:
    return divide_gpus(num_gpus, demands, "p", 0)


def workers(role: str, count: int, num_gpus: int, *, takes_turns: bool = True) -> list[GpuDemand]:
    return [GpuDemand(role, num_gpus, takes_turns)] * count


def test_a_role_that_fills_the_slot_has_its_gpus_in_order() -> None:
    assert divide(4, *workers("trainer", 4, 1)) == [(0,), (1,), (2,), (3,)]
    assert divide(4, *workers("generator", 2, 2)) == [(0, 1), (2, 3)]
    assert divide(3, *workers("generator", 1, 2)) == [(0, 1)]


def test_a_third_role_sits_where_fewest_do() -> None:
    demands = [*workers("trainer", 2, 1), *workers("generator", 2, 2), *workers("reference", 2, 1)]
    assert divide(4, *demands) == [(0,), (1,), (2, 3), (0, 1), (2,), (3,)]


def test_a_worker_without_turns_gets_exclusive_gpus_and_leaves_adjacent_ones() -> None:
    demands = [*workers("generator", 3, 2), *workers("reward", 1, 1, takes_turns=False)]
    assert divide(8, *demands) == [(0, 1), (2, 3), (4, 5), (7,)]


def test_two_that_take_no_turns_do_not_meet() -> None:
    demands = [*workers("judge", 1, 1, takes_turns=False), *workers("reward", 1, 1, takes_turns=False)]
    assert divide(2, *demands) == [(1,), (0,)]
    with pytest.raises(ConfigError, match="has 1, of which judge has 1 alone"):
        divide(1, *demands)


ROLES = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=5)


@given(st.integers(2, 8), ROLES)
def test_every_fitting_demand_gets_adjacent_gpus_and_no_gpu_twice_in_a_role(
    num_gpus: int, asked: list[tuple[int, int]]
) -> None:
    roles = [(f"r{i}", count, size) for i, (count, size) in enumerate(asked)]
    demands = [demand for name, count, size in roles for demand in workers(name, count, size)]
    if any(count > num_gpus // size for _, count, size in roles):
        with pytest.raises(ConfigError, match="but the slot has"):
            divide(num_gpus, *demands)
        return
    given_gpus = divide(num_gpus, *demands)
    for name, count, size in roles:
        own = [gpus for gpus, demand in zip(given_gpus, demands, strict=True) if demand.role == name]
        assert len({gpu for gpus in own for gpu in gpus}) == count * size
        for gpus in own:
            assert list(gpus) == list(range(gpus[0], gpus[0] + size))
            assert gpus[0] % size == 0
            assert gpus[-1] < num_gpus
