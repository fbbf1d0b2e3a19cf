from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from chatlearn_core.exceptions import ModelError
from chatlearn_hf import forward_check
from chatlearn_hf.forward_check import ForwardCheck, Way, with_attention
from chatlearn_hf.model_directory import not_loadable, register_varlen_attention
from chatlearn_hf.packed_forward import PackedModel
from chatlearn_hf.tiny_architectures import DYNAMIC_ROPE, LONG_ROPE, build_tiny
from chatlearn_hf.varlen_attention import VARLEN_ATTENTION, PackedLayout

PACKED = Way("varlen", "packed")


def check_of(model_type: str, attention: str = VARLEN_ATTENTION, head: str = "lm", **fields: object) -> ForwardCheck:
    register_varlen_attention()
    return ForwardCheck(PackedModel(build_tiny(model_type, attention, head, **fields), head))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("qwen3_moe", {}),
        ("deepseek_v3", {}),  # value heads of another size
        ("gemma2", {}),  # soft caps on scores and logits, windows
        ("gpt_oss", {}),  # sinks, windows
        ("granite", {}),
        ("cohere2", {}),
        ("phi3", {"rope_parameters": LONG_ROPE}),
        ("llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 12}),
    ],
)
def test_packable_models_are_packed(model_type, fields) -> None:
    check = check_of(model_type, **fields)
    choice = check.choose("varlen")
    assert (choice.way, choice.note(model_type)) == (PACKED, None)
    assert check.model.rows == "packed"
    assert check.model.model.config._attn_implementation == VARLEN_ATTENTION


@pytest.mark.parametrize(
    ("model_type", "attention", "reason"),
    [
        ("qwen3_next", "sdpa", "carry a state from one sequence of a row to the next"),
        ("mamba", "eager", "carry a state"),
        ("lfm2_moe", "sdpa", "carry a state"),
        ("bart", "sdpa", "logits differ from those of each sequence alone by"),
        ("phimoe", "sdpa", "by [0-9.]+ standard deviations; the tolerance is 0.001"),
        ("llama4_text", "sdpa", "by [0-9.]+ standard deviations; the tolerance is 0.001"),
        ("deepseek_v32", "sdpa", "sparse attention selects among the tokens of a whole row"),
        ("stablelm", "sdpa", "ModelError: attention 'chatlearn_varlen' runs packed rows only"),
    ],
)
def test_other_models_are_padded_with_a_note(model_type, attention, reason) -> None:
    choice = check_of(model_type).choose("varlen")
    assert choice.way == Way(attention, "padded")
    note = choice.note(model_type)
    assert note is not None
    assert note.startswith(
        f"model type '{model_type}' is computed with attention {attention}, sequences padded instead of attention"
        " varlen, sequences packed, which gives wrong results: "
    )
    assert re.search(reason, note)


def test_sequences_longer_than_a_window_are_compared() -> None:
    choice = check_of("phimoe", sliding_window=20).choose("varlen")
    assert choice.way == Way("sdpa", "padded")
    assert "(beyond its window or original context)" in choice.refused[0][1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_made_without_positions_are_seen(attention) -> None:
    """BLOOM's and OPT's masks do not tell the sequences of a row apart."""
    assert check_of("opt", attention).choose(attention).way == Way(attention, "padded")  # type: ignore[arg-type]


def test_a_dropped_soft_cap_is_refused_even_where_it_changes_little() -> None:
    """At the cap of real models, tiny ones differ by less than is allowed in low precision."""
    check = check_of("gemma2", "sdpa", attn_logit_softcapping=50.0)
    with pytest.raises(ModelError) as refused:
        check.choose("sdpa")
    message = str(refused.value)
    assert "model type 'gemma2' is not computed right with attention 'sdpa' and sequences 'auto'" in message
    assert "drops the soft cap on attention scores (config.json: attn_logit_softcapping)" in message
    advised = message.split("Correct for this model: ")[1].removesuffix(".").split("; ")
    assert advised == [
        "attention varlen, sequences packed",
        "attention eager, sequences padded",
        "attention eager, sequences packed",
    ]


def test_a_model_that_no_way_computes_is_refused() -> None:
    with pytest.raises(ModelError, match="No other combination of attention and sequences is correct either"):
        check_of("xlnet", "eager").choose("eager")


def test_asking_for_packed_rows_refuses_and_asking_for_padded_ones_pads() -> None:
    with pytest.raises(
        ModelError, match=r"sequences 'packed'.*Correct for this model: attention sdpa, sequences padded"
    ):
        check_of("qwen3_next").choose("varlen", "packed")
    assert check_of("llama").choose("varlen", "padded").way == Way("sdpa", "padded")


@pytest.mark.parametrize(("head", "model_type"), [("value", "llama"), ("reward", "llama"), ("reward", "phimoe")])
def test_other_heads_are_compared_too(head, model_type) -> None:
    assert check_of(model_type, head=head).choose("varlen").way.rows == (
        "padded" if model_type == "phimoe" else "packed"
    )


def test_a_wrong_head_is_seen(monkeypatch) -> None:
    """The mutant drops what Granite does to its logits."""
    monkeypatch.setattr("chatlearn_hf.packed_forward.own_head", lambda model: model.get_output_embeddings())
    with pytest.raises(ModelError, match="model type 'granite' is not computed right"):
        check_of("granite").choose("varlen")
    assert check_of("llama").choose("varlen").way == PACKED


LONG = {
    "mistral": {"sliding_window": 4096},
    "gemma3_text": {"sliding_window": 4096},
    "phimoe": {"sliding_window": 2047},
    "llama4_text": {"attention_chunk_size": 8192},
    "phi3": {"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": 4096}},
    "llama": {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 8192},
}


@pytest.mark.parametrize("model_type", LONG)
def test_long_thresholds_are_compared_with_a_stand_in(model_type) -> None:
    choice = check_of(model_type, **LONG[model_type]).choose("varlen")
    if model_type in ("phimoe", "llama4_text"):
        assert choice.way == Way("sdpa", "padded")
        assert "(found with a stand-in of the same settings and short windows)" in choice.refused[0][1]
    else:
        assert choice.way == PACKED


@pytest.mark.parametrize("model_type", LONG)
def test_without_a_stand_in_windows_are_trusted_only_where_layers_ask_for_them(monkeypatch, model_type) -> None:
    def no_stand_in(model):
        raise ValueError("of a class of its own")

    monkeypatch.setattr(forward_check, "build_stand_in", no_stand_in)
    choice = check_of(model_type, **LONG[model_type]).choose("varlen")
    if model_type in ("phimoe", "llama4_text"):
        assert choice.way == Way("sdpa", "padded")
        assert re.search(r"(window|size) \d+ \(config.json\) is too long for a comparison", choice.refused[0][1])
    else:
        assert choice.way == PACKED


def test_lengths_that_the_run_never_reaches_do_not_count() -> None:
    register_varlen_attention()
    model = PackedModel(build_tiny("phimoe", VARLEN_ATTENTION, sliding_window=40))
    assert ForwardCheck(model, max_length=40).choose("varlen").way == PACKED
    assert ForwardCheck(model, max_length=41).choose("varlen").way == Way("sdpa", "padded")


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_chunks_cut_a_whole_row_however_short_its_sequences_are(attention: str) -> None:
    register_varlen_attention()
    model = PackedModel(build_tiny("llama4_text", VARLEN_ATTENTION, attention_chunk_size=40, floor_scale=40))
    assert ForwardCheck(model, max_length=30).choose(attention).way == Way("sdpa", "padded")


def test_randomness_modes_and_gradients_are_left_alone() -> None:
    check = check_of("qwen3_next")
    check.model.train()
    state = torch.get_rng_state()
    check.choose("varlen")
    assert torch.equal(torch.get_rng_state(), state)
    assert check.model.training
    assert all(parameter.grad is None for parameter in check.model.parameters())


def test_damaged_weights_are_named() -> None:
    check = check_of("llama")
    torch.nn.init.constant_(check.model.model.lm_head.weight, float("nan"))
    with pytest.raises(ModelError, match="its weights are damaged"):
        check.choose("varlen")


def test_low_precision_allows_rounding_and_no_more() -> None:
    for model_type, way in (("qwen3_moe", PACKED), ("phimoe", Way("sdpa", "padded"))):
        model = PackedModel(build_tiny(model_type).to(torch.bfloat16))
        assert ForwardCheck(model, dtype=torch.bfloat16).choose("varlen").way == way


def test_a_model_with_its_own_attention_is_loaded_with_it() -> None:
    register_varlen_attention()

    def load(attention, model_type, asked):
        name = VARLEN_ATTENTION if attention == "varlen" else attention
        asked.append(attention)
        try:
            return build_tiny(model_type, name)
        except (ValueError, KeyError) as error:
            raise not_loadable("model", "somewhere", error) from error

    for model_type, expected in (
        ("gptj", "eager"),
        ("bloom", "eager"),
        ("falcon", "sdpa"),
        ("llama", VARLEN_ATTENTION),
    ):
        asked: list[str] = []
        model = with_attention("varlen", partial(load, model_type=model_type, asked=asked))
        assert model.config._attn_implementation == expected
        assert asked == ["varlen", "sdpa", "eager"][: {"eager": 3, "sdpa": 2}.get(expected, 1)]


def test_other_reasons_not_to_load_are_passed_on() -> None:
    def load(attention):
        raise ModelError("no such directory")

    with pytest.raises(ModelError, match="no such directory"):
        with_attention("varlen", load)


def test_padded_rows_give_every_output_of_packed_ones(make_batch) -> None:
    """Llama can do both: the outputs, their gradients, and a row of no tokens."""
    batch = make_batch(vocabulary=90)
    results = []
    for rows in ("packed", "padded"):
        model = PackedModel(build_tiny("llama", "sdpa"))
        model.rows = rows
        names = {"logprobs", "entropy", "hidden_states"}
        outputs = model(batch.token_ids, PackedLayout(batch.lengths), names, 0.7, batch.loss_mask)
        generator = torch.Generator().manual_seed(0)
        sum((outputs[n] * torch.randn(outputs[n].shape, generator=generator)).sum() for n in sorted(names)).backward()
        results.append((outputs, [parameter.grad for parameter in model.parameters()]))
        assert model(batch.token_ids[:0], PackedLayout([]), {"logprobs"})["logprobs"].shape == (0,)
    (packed, theirs), (padded, mine) = results
    for name, values in packed.items():
        torch.testing.assert_close(padded[name], values, atol=1e-5, rtol=1e-4)
    for ours, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
