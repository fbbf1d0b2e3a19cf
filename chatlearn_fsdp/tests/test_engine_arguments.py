import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_fsdp.engine_arguments import engine_problems
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.trainer import FSDPTrainer


def trainer(path: str, **arguments: object) -> FSDPTrainer:
    return FSDPTrainer(FSDPOptions(), RoleContext("critic", ModelSource(path, path), engine_arguments=arguments))


def test_owned_arguments_are_refused_before_a_model_is_read() -> None:
    with pytest.raises(ConfigError, match=r"roles\.critic\.engine.*\n  device_map: owned .*set roles\.<role>\.device"):
        trainer("nowhere", device_map="auto")
    assert engine_problems({"torch_dtype": "float32", "hidden_size": 3, "use_safetensors": "no"}) == {
        "torch_dtype": "owned by the backend; set options.master_dtype and options.param_dtype",
        "use_safetensors": "must be of type bool, but is 'no'",
    }


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("revison", "; did you mean 'revision'?"),
        ("rms_norm_epps", "; did you mean 'rms_norm_eps'?"),  # a field of the model's configuration
        ("_attn_implementation", "; did you mean 'attn_implementation'?"),
        ("from_tf", ""),  # transformers takes it without a word
        ("adapter_kwargs", ""),
    ],
)
def test_an_unknown_argument_is_refused_with_the_nearest_one(model_path, name, hint) -> None:
    with pytest.raises(ConfigError, match="does not pass to from_pretrained") as caught:
        trainer(model_path, **{name: 1}).setup()
    assert f"{name}: unknown{hint}\n" in str(caught.value)


@pytest.mark.engine
def test_fields_of_the_configuration_pass(model_path) -> None:
    made = trainer(model_path, rms_norm_eps=0.5, local_files_only=True)
    made.setup()
    assert made._model.model.config.rms_norm_eps == 0.5
    made.close()
