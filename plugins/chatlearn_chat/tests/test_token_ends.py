"""Where the tokens of a text end in it."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_chat.token_ends import decoded_lengths
from chatlearn_hf.tiny import build_tiny_tokenizer

TOKENIZER = build_tiny_tokenizer(400, ["one plus two = 3 \n\n", "so 1 + 2 = 3\n"] * 9)


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=st.sampled_from("ab \n=1é☃𝄞\ufffd"), max_size=24), st.randoms())
def test_lengths_are_those_of_decoding_each_prefix(text: str, random: Any) -> None:
    """However the text was cut into tokens, which need not be how the tokenizer would cut it."""
    raw = TOKENIZER.encode(text, add_special_tokens=False)
    ids = [one for piece in raw for one in split_at_random(piece, random)]
    decoded, lengths = decoded_lengths(TOKENIZER, ids, skip_special_tokens=True)
    assert decoded == text
    for index in range(len(ids)):
        whole = TOKENIZER.decode(ids[: index + 1])
        if text.startswith(whole):
            assert lengths[index] in (len(whole), len(whole.rstrip("\ufffd")))
        else:
            assert text[: lengths[index]] == whole[: lengths[index]], (
                "an unfinished character counts with its last token"
            )


def split_at_random(token_id: int, random: Any) -> list[int]:
    """The token, or the tokens of its bytes."""
    token = TOKENIZER.convert_ids_to_tokens(token_id)
    return [token_id] if random.random() < 0.5 else TOKENIZER.convert_tokens_to_ids(list(token))
