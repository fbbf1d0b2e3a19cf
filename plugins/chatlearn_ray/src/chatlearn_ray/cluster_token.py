"""The token of a cluster, which every node and driver needs, even without shared home directories."""

from __future__ import annotations

import importlib
import os
import secrets
import stat
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import ConfigError

TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
MODE = "RAY_AUTH_MODE"
DEFAULT_WAIT_S = 120.0
"""Seconds to wait, because the head may start later than other nodes, and a network disk shows the file late."""
_LOOK_S = 0.2
_NUM_BYTES = 32


def default_token_file() -> Path:
    """Return Ray's default location."""
    return Path.home() / ".ray" / "auth_token"


def use_token(
    environment: MutableMapping[str, str], token_file: Path | None, *, is_head: bool, wait_s: float = DEFAULT_WAIT_S
) -> str:
    """Configure ``environment`` so that Ray requires a token and has one. Returns a description of the token's source.

    The environment decides unless a file is named: ``RAY_AUTH_MODE=disabled``, ``RAY_AUTH_TOKEN`` or
    ``RAY_AUTH_TOKEN_PATH``. Otherwise it is Ray's file in the home directory. The head writes a missing file; other
    nodes wait for it.

    Raises:
        ConfigError: there is no token on this node.
    """
    if environment.get(MODE, "token").lower() != "token":
        if token_file is not None:
            raise ConfigError(f"--token-file is given, but {MODE} is {environment[MODE]!r}; unset one of them")
        return f"no token ({MODE}={environment[MODE]}): any process that reaches the cluster's ports can run code on it"
    environment[MODE] = "token"
    if token_file is None and environment.get(TOKEN):
        return f"token: the variable {TOKEN}"
    named = token_file or (Path(environment[TOKEN_PATH]) if environment.get(TOKEN_PATH) else None)
    path = (named or default_token_file()).expanduser().absolute()
    environment.pop(TOKEN, None)  # Ray would prefer the variable to the file
    environment[TOKEN_PATH] = str(path)
    if is_head:
        write_token(path)
    else:
        _wait_for(path, wait_s, is_default=named is None)
    return f"token: the file {path}{_is_open(path)}"


def observe_token() -> None:
    """Make this process's Ray read the token variables again, which it read on import."""
    try:
        inside: Any = importlib.import_module("ray._raylet")
        inside.Config.initialize("")
        inside.AuthenticationTokenLoader.instance().reset_cache()
    except (ImportError, AttributeError) as error:  # Ray 2.60 has both; neither is public
        raise ConfigError(
            f"the installed Ray cannot take a token after its import ({error}); remove runtime.options.token_file "
            f"and set {MODE}=token and {TOKEN_PATH} in the environment of the driver"
        ) from error


def write_token(path: Path) -> None:
    """Write a new token, readable only by its owner; an existing file is kept.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path.exists():
        return
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(_NUM_BYTES))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)  # a reader finds the whole file or none
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise ConfigError(f"the cluster's token cannot be written to {path}: {error}") from error


def _wait_for(path: Path, wait_s: float, *, is_default: bool) -> None:
    deadline = time.monotonic() + wait_s
    while not path.exists():
        if time.monotonic() >= deadline:
            cause = (
                "this node has its own home directory, and the head writes only its own copy"
                if is_default
                else "the head writes the file, so it must be on a shared disk"
            )
            raise ConfigError(
                f"the cluster's token is not in {path} after {wait_s:g} s; {cause}. "
                "Name a file on a shared disk (chatlearn cluster up --token-file FILE), or let the launcher"
                f" set {TOKEN} on every node"
            )
        time.sleep(_LOOK_S)


def _is_open(path: Path) -> str:
    return ", which other users can read: chmod 600" if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) else ""
