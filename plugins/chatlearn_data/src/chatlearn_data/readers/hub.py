"""Reads rows of datasets on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator

from chatlearn_core.data.format import Row
from chatlearn_core.exceptions import DataError
from chatlearn_data.options import NoOptions


class HubReader:
    """Downloads a hub dataset once (or uses the cache) and reads its rows.

    ``owner/name`` selects the dataset's default configuration, ``owner/name:main`` the named one. Without a split the
    dataset must have only one.
    """

    def __init__(self, options: NoOptions) -> None:
        del options

    def rows(self, path: str, split: str | None) -> Iterator[Row]:
        import datasets  # slow to import, and rarely needed

        name, _, configuration = path.partition(":")
        try:
            loaded = datasets.load_dataset(name, configuration or None, split=split)
        except Exception as error:  # the library raises errors of HTTP, file systems and the hub client
            raise DataError(_message(path, split, error)) from error
        if isinstance(loaded, dict):
            if len(loaded) != 1:
                raise DataError(f"Hub dataset '{path}' has several splits; set split to one of: {', '.join(loaded)}.")
            (loaded,) = loaded.values()
        yield from loaded


def _message(path: str, split: str | None, error: Exception) -> str:
    import huggingface_hub.constants

    lines = [
        f"Dataset '{path}' is neither local nor loadable from the hub (split {split or 'any'}):",
        f"  {type(error).__name__}: {str(error).partition(chr(10))[0] or 'no message'}",
    ]
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        lines.append("  HF_HUB_OFFLINE is set, so only datasets in the local cache can be used.")
    lines.append("  Check path and split, or give the path of a downloaded file.")
    return "\n".join(lines)
