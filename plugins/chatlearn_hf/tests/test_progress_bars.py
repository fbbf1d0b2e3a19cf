from transformers.utils import logging

from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_hf.progress_bars import no_progress_bars


def test_bars_come_back_as_they_were() -> None:
    assert logging.is_progress_bar_enabled()
    with no_progress_bars():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with no_progress_bars():
            pass
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.enable_progress_bar()


def test_loading_draws_nothing(tiny, capfd) -> None:
    load_causal_lm(str(tiny()))
    assert "Loading weights" not in capfd.readouterr().err
