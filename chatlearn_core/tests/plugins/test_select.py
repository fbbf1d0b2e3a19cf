from __future__ import annotations

from email.message import Message
from importlib import metadata
from typing import get_args

import pytest

from chatlearn_core.exceptions import (
    PluginConflictError,
    PluginError,
    PluginIncompatibleError,
    PluginNotFoundError,
)
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import GeneratorSpec, Kind
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.select import KIND_TITLES

WHERE = "configs/run.yaml, roles.generator.backend"


def generator(name: str, distribution: str, status: str = "ok", reason: str = "", **record) -> PluginEntry:
    spec = GeneratorSpec(**{"name": name, "factory": "json:dumps", "options": "json:dumps", **record})
    usable = status in ("ok", "missing-engine", "conflict")
    return PluginEntry(
        name=name,
        kind="generator",
        distribution=distribution,
        version="0.1.0",
        status=status,
        reason=reason,
        record=spec if usable else None,
    )


TRANSFORMERS = generator("transformers", "chatlearn-transformers")
VLLM = generator("vllm", "chatlearn-vllm")
BROKEN = PluginEntry(
    name="acme",
    kind=None,
    distribution="acme-generator",
    version="0.3.0",
    status="failed",
    reason="ModuleNotFoundError: No module named 'acme_engine'",
)
REWARD = PluginEntry(name="vlm", kind="reward", distribution="r", version="1", status="ok")


def test_the_record_of_that_kind_and_name() -> None:
    registry = PluginRegistry((REWARD, TRANSFORMERS, VLLM, BROKEN))
    assert registry.select("generator", "vllm", WHERE) is VLLM.record
    assert registry.records("generator") == (TRANSFORMERS.record, VLLM.record)


def test_an_unknown_name_names_choices_failures_and_the_nearest() -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        PluginRegistry((REWARD, TRANSFORMERS, VLLM, BROKEN)).select("generator", "vlm", WHERE)
    assert str(caught.value) == (
        "No generator backend named 'vlm' (configs/run.yaml, roles.generator.backend).\n"
        "  installed:      transformers (chatlearn-transformers 0.1.0); vllm (chatlearn-vllm 0.1.0)\n"
        "  failed to load: acme (acme-generator 0.3.0): ModuleNotFoundError: No module named 'acme_engine'\n"
        "  Did you mean 'vllm'?\n"
        "  'vlm' is the name of a reward."
    )


def test_an_engine_that_may_have_its_own_interpreter_says_so() -> None:
    engines = (("acme-engine>=2", "acme-engine-cpu>=2"),)
    entry = generator("acme", "acme-a", "missing-engine", "...", requires=engines, own_interpreter=True)
    with pytest.raises(PluginIncompatibleError) as caught:
        PluginRegistry((entry,)).select("generator", "acme", WHERE)
    assert (
        "Install it there (pip install 'acme-engine>=2' or 'acme-engine-cpu>=2'), name an interpreter that holds it in "
        "options.python, or choose another backend."
    ) in str(caught.value)


def test_a_name_that_an_extra_brings_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Message()
    found["Provides-Extra"] = "ray"
    found["Provides-Extra"] = "vllm"
    monkeypatch.setattr(metadata, "metadata", lambda distribution: {"chatlearn": found}[distribution])
    with pytest.raises(PluginNotFoundError, match=r"\n  It comes with: pip install 'chatlearn\[vllm\]'$"):
        PluginRegistry((TRANSFORMERS,)).select("generator", "vllm", WHERE)
    with pytest.raises(PluginNotFoundError, match=r"installed: transformers \(chatlearn-transformers 0\.1\.0\)$"):
        PluginRegistry((TRANSFORMERS,)).select("generator", "unheard-of", WHERE)


def test_the_default_runtime_that_is_not_installed_says_what_brings_it() -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        PluginRegistry((TRANSFORMERS,)).select("runtime", "local", "configs/run.yaml, runtime.backend")
    assert str(caught.value) == (
        "No runtime named 'local' (configs/run.yaml, runtime.backend).\n"
        "  installed: none\n"
        "  It comes with: pip install chatlearn-local"
    )


def test_a_name_of_another_kind_says_of_which() -> None:
    with pytest.raises(PluginNotFoundError, match=r"\n  'vllm' is the name of a generator backend\.$"):
        PluginRegistry((VLLM,)).select("trainer", "vllm", WHERE)


def test_nothing_installed_at_all() -> None:
    with pytest.raises(PluginNotFoundError, match=r"^No generator backend named 'vlm'\.\n  installed: none$"):
        PluginRegistry().select("generator", "vlm")


def test_a_failed_plugin_says_why_when_it_is_selected() -> None:
    with pytest.raises(PluginNotFoundError, match=r"acme \(acme-generator 0\.3\.0\): ModuleNotFoundError"):
        PluginRegistry((VLLM, BROKEN)).select("generator", "acme", WHERE)


def test_a_disabled_plugin_says_so() -> None:
    disabled = PluginEntry(
        name="acme",
        kind=None,
        distribution="acme",
        version="1",
        status="disabled",
        reason="by CHATLEARN_DISABLE_PLUGINS",
    )
    with pytest.raises(PluginNotFoundError, match=r"disabled: +acme \(acme 1\): by CHATLEARN_DISABLE_PLUGINS"):
        PluginRegistry((VLLM, disabled)).select("generator", "acme", WHERE)


def test_a_conflict_names_both_and_prefers_none() -> None:
    twice = (generator("acme", "acme-a", "conflict", "..."), generator("acme", "acme-b", "conflict", "..."))
    with pytest.raises(PluginConflictError) as caught:
        PluginRegistry(twice).select("generator", "acme", WHERE)
    assert str(caught.value) == (
        "The generator backend 'acme' is registered 2 times (configs/run.yaml, roles.generator.backend); "
        "none is preferred.\n"
        "  acme (acme-a 0.1.0)\n"
        "  acme (acme-b 0.1.0)\n"
        "  Uninstall one, or name its distribution in CHATLEARN_DISABLE_PLUGINS."
    )


def test_an_incompatible_plugin_names_both_versions() -> None:
    reason = "written for plugin API 3, this ChatLearn has plugin API 2; update ChatLearn"
    entries = (generator("acme", "acme-a", "incompatible", reason), VLLM)
    with pytest.raises(PluginIncompatibleError) as caught:
        PluginRegistry(entries).select("generator", "acme", WHERE)
    assert str(caught.value) == (
        "The generator backend 'acme' is not compatible (configs/run.yaml, roles.generator.backend).\n"
        f"  acme (acme-a 0.1.0): {reason}\n"
        "  installed: vllm (chatlearn-vllm 0.1.0)"
    )


def test_the_engine_is_looked_up_where_the_backend_will_run() -> None:
    entry = generator("acme", "acme-a", "missing-engine", "...", requires=(("acme-engine>=2",),))
    registry = PluginRegistry((entry, VLLM))
    with pytest.raises(PluginIncompatibleError) as caught:
        registry.select("generator", "acme", WHERE, installed={"acme-engine": "1.0"}.get)
    assert str(caught.value) == (
        "The generator backend acme (acme-a 0.1.0) cannot run here (configs/run.yaml, roles.generator.backend).\n"
        "  needs acme-engine>=2; installed: acme-engine 1.0\n"
        "  Install it there (pip install 'acme-engine>=2'), or choose another backend.\n"
        "  installed: vllm (chatlearn-vllm 0.1.0)"
    )
    assert registry.select("generator", "acme", WHERE, installed={"acme-engine": "2.1"}.get) is entry.record
    assert registry.select("generator", "acme", WHERE, installed=None) is entry.record
    with pytest.raises(PluginIncompatibleError, match="installed: none"):
        registry.select("generator", "acme", WHERE)


def test_loading_what_a_record_names() -> None:
    registry = PluginRegistry((generator("acme", "acme-a", factory="json:dumps"),))
    assert registry.load_factory(registry.select("generator", "acme"))([1], indent=None) == "[1]"


def test_a_constructor_that_calls_sys_exit_is_a_failed_plugin() -> None:
    registry = PluginRegistry((generator("acme", "acme-a", factory="sys:exit"),))
    build = registry.load_factory(registry.select("generator", "acme"))
    with pytest.raises(PluginError, match=r"(?s)'acme' \(acme-a 0\.1\.0\) tried to end the process.*SystemExit\(3\)"):
        build(3)


def test_ctrl_c_in_a_constructor_stays_what_it_is(monkeypatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("json.dumps", interrupted)
    registry = PluginRegistry((generator("acme", "acme-a", factory="json:dumps"),))
    with pytest.raises(KeyboardInterrupt):
        registry.load_factory(registry.select("generator", "acme"))()


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("no_such_module:F", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:no_such_name", "ImportError: module 'json' has no attribute 'no_such_name'"),
        ("json:__name__", "it must be callable"),
    ],
)
def test_code_that_cannot_be_loaded_names_plugin_and_version(factory: str, reason: str) -> None:
    registry = PluginRegistry((generator("acme", "acme-a", factory=factory),))
    with pytest.raises(PluginError, match=r"The generator backend 'acme' \(acme-a 0\.1\.0\)") as caught:
        registry.load_factory(registry.select("generator", "acme"))
    assert reason in str(caught.value)
    assert factory in str(caught.value)


def test_options_must_be_a_pydantic_model() -> None:
    from chatlearn_core.config.models import SamplingConfig

    good = generator("good", "acme-a", options="chatlearn_core.config.models:SamplingConfig")
    registry = PluginRegistry((good, generator("acme", "acme-a", options="json:JSONDecoder")))
    assert registry.load_options(registry.select("generator", "good")) is SamplingConfig
    with pytest.raises(PluginError, match="it must be a pydantic model"):
        registry.load_options(registry.select("generator", "acme"))


def test_every_kind_of_plugin_has_a_title() -> None:
    assert KIND_TITLES.keys() == set(get_args(Kind))
