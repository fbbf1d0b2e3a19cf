"""Sets the stop tokens of an exported model: ``eos_token_id`` of ``generation_config.json``."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from chatlearn_chat import ChatTemplateRenderer

_FILE = "generation_config.json"


def stop_at_end_of_turn(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the end-of-turn token of the tokenizer's chat template to the stop tokens of the model in ``directory``.

    Without it, a base model that has learned the template would continue after its answer when it is served.
    """
    file = directory / _FILE
    end = ChatTemplateRenderer(tokenizer).end_of_turn_id  # type: ignore[arg-type]  # its keyword arguments are wider
    if end is None or not file.is_file():
        return
    settings = json.loads(file.read_text(encoding="utf-8"))
    named = settings.get("eos_token_id")
    stops = named if isinstance(named, list) else [] if named is None else [named]
    if end not in stops:
        settings["eos_token_id"] = [*stops, end] if stops else end
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
