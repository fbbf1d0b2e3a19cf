"""No model type is computed wrong without a word: makes the table in ``docs/models.md`` (``make test-models``)."""

from __future__ import annotations

import logging

import pytest
import transformers
from model_table import names, row_of, write_table

pytestmark = pytest.mark.models


@pytest.mark.timeout(3600)
def test_every_causal_model_type_is_right_or_refused(tmp_path) -> None:
    transformers.logging.set_verbosity_error()
    logging.getLogger("chatlearn_hf").setLevel(logging.ERROR)
    rows = [row_of(name, tmp_path / name.replace(" ", "_")) for name in names()]
    write_table(rows)
    assert not [row for row in rows if row.is_wrong]
    trained = [row for row in rows if row.cells and row.cells["varlen"] != "refused"]
    assert len(trained) > 0.9 * len(rows), "most types can be trained"
