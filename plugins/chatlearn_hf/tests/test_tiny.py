import torch

from chatlearn_hf.model_directory import load_causal_lm, load_tokenizer
from chatlearn_hf.tiny import build_tiny_model, build_tiny_tokenizer


def test_text_round_trips_and_the_template_ends_with_the_assistant(tiny) -> None:
    tokenizer = load_tokenizer(str(tiny()))
    text = "2 + 2 = 4, naïve ☃"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_extra_tokens_are_single() -> None:
    tokenizer = build_tiny_tokenizer(400, extra_tokens=["1234"])
    assert len(tokenizer.encode("1234")) == 1


def test_same_seed_same_weights_and_no_trace_in_the_random_state(tmp_path) -> None:
    state = torch.get_rng_state()
    first, second, third = (
        load_causal_lm(str(build_tiny_model(tmp_path / name, seed=seed))).state_dict()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], third["model.embed_tokens.weight"])
