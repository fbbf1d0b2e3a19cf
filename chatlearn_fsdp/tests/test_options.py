import subprocess
import sys

import pytest
from pydantic import ValidationError

from chatlearn_fsdp.options import FSDPOptions


def test_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="learning_rat"):
        FSDPOptions(learning_rat=1.0)


def test_master_dtype_below_compute_dtype_is_refused() -> None:
    with pytest.raises(ValidationError, match="master_dtype"):
        FSDPOptions(param_dtype="float32", master_dtype="bfloat16")


def test_ulysses_needs_its_attention() -> None:
    assert FSDPOptions(ulysses=2).attention == "varlen"
    with pytest.raises(ValidationError, match=r"ulysses 2 .* attention is 'sdpa'; set attention: varlen"):
        FSDPOptions(ulysses=2, attention="sdpa")
    with pytest.raises(ValidationError, match=r"ring 3 .* attention is 'eager'; set attention: varlen, or ring: 1"):
        FSDPOptions(ring=3, attention="eager")
    with pytest.raises(ValidationError, match="ulysses 2 and ring 2 both divide the tokens of a row; set one of them"):
        FSDPOptions(ulysses=2, ring=2)


def test_layers_are_split_in_one_way() -> None:
    with pytest.raises(
        ValidationError, match="tensor_parallel 2 splits layers by heads and ulysses 2 splits rows by tok"
    ):
        FSDPOptions(tensor_parallel=2, ulysses=2)
    with pytest.raises(
        ValidationError, match="tensor_parallel 2 splits layers by heads and ring 4 splits rows by tokens"
    ):
        FSDPOptions(tensor_parallel=2, ring=4)
    with pytest.raises(
        ValidationError, match=r"tensor_parallel 2 splits the weights .* set tensor_parallel: 1, or lora: n"
    ):
        FSDPOptions.model_validate({"tensor_parallel": 2, "lora": {"rank": 4}})


def test_adapters_from_a_file() -> None:
    options = FSDPOptions.model_validate({"lora": {"rank": 8, "target_modules": ["q_proj", "v_proj"]}})
    assert options.lora is not None
    assert options.lora.target_modules == ("q_proj", "v_proj")
    assert options.model_dump(mode="json")["lora"]["alpha"] == 32.0


def test_plugin_and_options_import_no_engine() -> None:
    code = (
        "import sys, chatlearn_fsdp.plugin as p, chatlearn_fsdp.options; spec, = p.chatlearn_trainers();"
        "assert spec.name == 'fsdp'; assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_record_names_options_that_exist() -> None:
    from chatlearn_fsdp.plugin import chatlearn_trainers

    [record] = chatlearn_trainers()
    assert set(record.layout_options) <= FSDPOptions.model_fields.keys()
    assert set(record.parallel.values()) <= set(record.layout_options)


def test_a_stage_that_shards_nothing_refuses_what_needs_shards() -> None:
    with pytest.raises(ValidationError, match="zero_stage 0 shards nothing, but dp_shard is 2"):
        FSDPOptions(zero_stage=0, dp_shard=2)
    with pytest.raises(ValidationError, match="cpu_offload keeps weights in host memory, but zero_stage 2"):
        FSDPOptions(zero_stage=2, cpu_offload=True)
    with pytest.raises(ValidationError, match="dp_replicate 2 x dp_shard null x ulysses 1 is 2, but the role has rank"):
        FSDPOptions.model_validate({"zero_stage": 0, "dp_replicate": 2}, context={"ranks": 4})


@pytest.mark.parametrize(
    "options", [{"dp_shard": 3}, {"ulysses": 3}, {"ring": 3}, {"tensor_parallel": 3}, {"dp_replicate": 8}]
)
def test_sizes_that_do_not_divide_the_ranks_are_refused_where_the_ranks_are_known(options: dict[str, int]) -> None:
    FSDPOptions.model_validate(options)
    FSDPOptions.model_validate(options, context={"ranks": 3 * 8 if "dp_shard" not in options else 3})
    with pytest.raises(ValidationError, match=r"is .*, but the role has ranks: 4"):
        FSDPOptions.model_validate(options, context={"ranks": 4})
