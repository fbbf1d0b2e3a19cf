"""Replacing the adapter on a rank, without SGLang: ``test_adapters.py`` does it with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chatlearn_sglang import engine_arguments
from chatlearn_sglang.engine_side import adapter


class Manager:
    """SGLang's manager of adapters, as far as it is used."""

    def __init__(self, *refused: str) -> None:
        other = SimpleNamespace(lora_name="another", lora_id="0")
        self.lora_refs = {"0": other, "1": SimpleNamespace(lora_name=adapter.NAME, lora_id="1")}
        self.refused = refused
        self.called: list[tuple[Any, ...]] = []

    def answer(self, *call: Any) -> SimpleNamespace:
        self.called.append(call)
        return SimpleNamespace(success=call[0] not in self.refused, error_message="no room")

    def unload_lora_adapter(self, reference: Any) -> SimpleNamespace:
        return self.answer("unload", reference.lora_id)

    def load_lora_adapter_from_tensors(self, reference: Any, tensors: Any, config: Any) -> SimpleNamespace:
        return self.answer("load", reference.lora_id, tensors, config)

    def fetch_new_loras(self, names: set[str]) -> None:
        self.called.append(("fetch", names))


@pytest.fixture(autouse=True)
def _forget() -> None:
    adapter._managers.clear()


def test_the_adapter_is_replaced_under_the_name_that_requests_use() -> None:
    manager = Manager()
    adapter.keep_manager(None, manager)
    adapter.replace({"a": torch.ones(1)}, {"r": 1}, [("b", "bfloat16", [2, 3])])
    unload, (_, name, tensors, config), fetch = manager.called
    assert (unload, name, config, fetch) == (("unload", "1"), "1", {"r": 1}, ("fetch", {"1"}))
    assert torch.equal(tensors["b"], torch.zeros(2, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("refused", ["unload", "load"])
def test_a_refusal_by_sglang_is_an_error_with_its_message(refused: str) -> None:
    adapter.keep_manager(None, Manager(refused))
    with pytest.raises(RuntimeError, match="SGLang refused the adapter: no room"):
        adapter.replace({}, {}, [])


def test_the_engine_s_processes_read_the_variable_that_is_set() -> None:
    assert engine_arguments.ADAPTER_VARIABLE == adapter.VARIABLE
