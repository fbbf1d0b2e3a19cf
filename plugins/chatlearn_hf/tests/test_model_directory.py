import contextlib
import json
import os
import shutil

import pytest
import torch

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.model_directory import (
    check_model_directory,
    check_tokenizer_fits,
    load_causal_lm,
    load_config,
    load_tokenizer,
    max_length,
)
from chatlearn_hf.tiny import build_tiny_tokenizer


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny(), tmp_path / "model")


def test_a_good_directory_passes(tiny) -> None:
    assert check_model_directory(str(tiny())) == tiny()
    assert max_length(load_config(str(tiny()))) == 512


def test_a_path_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        check_model_directory(str(tmp_path / "nothing"))


def test_a_hub_id_without_network(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert check_model_directory("nobody/no-such-model") is None
    with pytest.raises(ModelError, match="neither a model directory on this machine nor a hub id"):
        load_causal_lm("nobody/no-such-model")


def test_no_weights(copy) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"):
        check_model_directory(str(copy))


def test_no_config(copy) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_causal_lm(str(copy))


def test_config_that_is_not_json(copy) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        check_model_directory(str(copy))


@pytest.mark.parametrize("keep", [0, 100, 20_000])
def test_weights_cut_short(copy, keep) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        load_causal_lm(str(copy))


def test_index_that_names_a_missing_file(copy) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        check_model_directory(str(copy))


def test_configuration_that_was_edited(copy) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(ModelError, match=r"config\.json|mlp"):
        load_causal_lm(str(copy))


def test_a_foreign_tokenizer_names_both_numbers(copy) -> None:
    build_tiny_tokenizer(600, extra_tokens=[f"<{n}>" for n in range(300)]).save_pretrained(copy)
    largest = max(load_tokenizer(str(copy)).get_vocab().values())
    size = load_config(str(copy)).vocab_size
    with pytest.raises(ModelError, match=rf"largest token id is {largest}, but the model's vocabulary has {size}"):
        check_model_directory(str(copy))
    with pytest.raises(ModelError, match="does not belong"):
        check_tokenizer_fits(load_tokenizer(str(copy)), load_config(str(copy)), "here")


def test_no_tokenizer(tmp_path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_code_in_a_model_directory_is_not_run(copy, tmp_path) -> None:
    (copy / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\n")
    config = json.loads((copy / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]}
    (copy / "config.json").write_text(json.dumps(config | {"auto_map": auto_map, "model_type": "evil"}))
    for load in (load_config, load_causal_lm, load_tokenizer):
        with contextlib.suppress(ModelError):  # a tokenizer of a known class needs no code
            load(str(copy))
    assert not (tmp_path / "executed").exists()


class Hostile:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory) -> None:
        self.directory = directory

    def __reduce__(self):
        return os.mkdir, (str(self.directory),)


def test_pickled_weights_cannot_execute(copy, tmp_path, monkeypatch) -> None:
    (copy / "model.safetensors").unlink()
    torch.save({"w": Hostile(tmp_path / "executed")}, copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match="expected model"):
        load_causal_lm(str(copy))
    # The files of a hub id are not looked at before transformers opens them.
    monkeypatch.setattr("chatlearn_hf.model_directory.check_model_directory", lambda path: None)
    with pytest.raises(ModelError, match="more than tensors; nothing in it was executed"):
        load_causal_lm(str(copy))
    assert not (tmp_path / "executed").exists()


def edit(directory, **fields) -> str:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return str(directory)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_a_description_that_is_nested_deeply(copy, text) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json is (nested too deeply|not valid JSON)"):
        check_model_directory(str(copy))


def test_a_billion_layers(copy) -> None:
    with pytest.raises(ModelError, match=r"num_hidden_layers: 1000000000, but the weights beside it have \d+ tensors"):
        check_model_directory(edit(copy, num_hidden_layers=10**9))
    with pytest.raises(ModelError, match="num_labels: 1000000000"):
        check_model_directory(edit(copy, num_hidden_layers=2, text_config={"num_labels": 10**9}))


@pytest.mark.parametrize("value", ["many", 0, -5, [512], 1.5])
def test_sizes_that_are_none(copy, value) -> None:
    with pytest.raises(ModelError, match=r"vocab_size|cannot load the (configuration|model)"):
        load_causal_lm(edit(copy, vocab_size=value))
    with pytest.raises(ModelError, match=r"max_position_embeddings|cannot load the configuration"):
        max_length(load_config(edit(copy, vocab_size=512, max_position_embeddings=value)))


@pytest.mark.parametrize("fields", [{"num_attention_heads": 0}, {"hidden_size": 10**12}, {"rope_parameters": 3}])
def test_shapes_that_make_no_sense(copy, fields) -> None:
    with pytest.raises(ModelError, match=r"cannot load the|do not match its config\.json"):
        load_causal_lm(edit(copy, **fields))


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({"weight_map": {"a": "../elsewhere.safetensors"}}, r"names files outside its directory: '\.\./elsewhere"),
        ({"weight_map": {"a": "/etc/passwd"}}, "names files outside its directory"),
        ({"weight_map": ["model.safetensors"]}, "is not a safetensors index"),
        ({"weight_map": {}}, "is not a safetensors index"),
        ([], "is not a safetensors index"),
        ({"weight_map": {"a": {"b": 1}}}, "names missing files"),
    ],
)
def test_an_index_that_cannot_be_used(copy, index, problem) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=problem):
        check_model_directory(str(copy))
