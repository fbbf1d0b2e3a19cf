"""What the two ends of a weight sync return is checked where it arrives; the error names the plugin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chatlearn_core.exceptions import BackendError, WeightSyncError
from chatlearn_core.types import SyncOffer
from chatlearn_runtime_kit.sync_answers import SEND, checked_num_bytes, checked_offer, whole_manifest
from chatlearn_runtime_kit.weight_ends import unfit_tensors

TRANSPORT = "weight sync 'acme' (acme-sync 1.0)"


@pytest.mark.parametrize("answer", [None, "3", 2.0, True, -1])
@pytest.mark.parametrize("call", [SEND, "receive() of its receiver"])
def test_a_number_of_bytes_is_one(answer: object, call: str) -> None:
    with pytest.raises(WeightSyncError) as caught:
        checked_num_bytes(answer, TRANSPORT, call)
    assert str(caught.value).startswith(f"{TRANSPORT}: {call} returned a {type(answer).__name__}")
    assert checked_num_bytes(0, TRANSPORT, call) == 0


@pytest.mark.parametrize("answer", [None, "path", SyncOffer(1, "path"), SyncOffer("0", "path")])  # type: ignore[arg-type]
def test_an_offer_is_one_of_that_rank(answer: object) -> None:
    with pytest.raises(WeightSyncError, match=r"weight sync 'acme' .*: offer\(\) of its sender"):
        checked_offer(answer, TRANSPORT, 0)


def test_manifests_are_manifests() -> None:
    with pytest.raises(BackendError, match=r"acme-trainer: manifest\(\) on rank 0 returned a dict"):
        whole_manifest({}, "acme-trainer")
    loader: Any = SimpleNamespace(expected_manifest=lambda: ["weight"])
    request: Any = SimpleNamespace(payload="full", manifest=None)
    [line] = unfit_tensors(loader, request)
    assert line.startswith("expected_manifest() of the generator's loader returned a list: ['weight']")
