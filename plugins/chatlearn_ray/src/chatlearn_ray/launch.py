"""``chatlearn cluster up``: chooses the launcher of this process, and derives its node's Ray command."""

from __future__ import annotations

from collections.abc import Mapping

from chatlearn_core.exceptions import ConfigError, PluginError
from chatlearn_core.plugins.records import LauncherSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import NodePart

DEFAULT_PORT = 6379
"""Ray's default port. ``MASTER_PORT`` is used by the launcher's own rendezvous."""


def ray_command(part: NodePart, port: int = DEFAULT_PORT) -> list[str]:
    """Return the ``ray start`` command of a node; it stays in the foreground, so that the launcher notices its end."""
    if part.rank == 0:
        return ["ray", "start", "--head", f"--port={port}", "--include-dashboard=false", "--block"]
    return ["ray", "start", f"--address={part.head}:{port}", "--block"]


def find_part(
    registry: PluginRegistry, environment: Mapping[str, str], name: str | None = None
) -> tuple[str, NodePart]:
    """Return the name of the launcher that started this process, and the process's part.

    Args:
        registry: has the launchers.
        environment: variables of the process.
        name: of the launcher to ask; None asks all, and the lowest ``order`` counts.

    Raises:
        PluginNotFoundError: no launcher has that name.
        PluginError: a launcher cannot be imported, or fails.
        ConfigError: no launcher recognises the process, or two of the same order do; or a variable is malformed.
    """
    if name is not None:
        record = registry.select("launcher", name, "--launcher")
        part = _asked(registry, record, environment)
        if part is None:
            raise ConfigError(
                f"the launcher {_described(record)} did not start this process; its variables are not set"
            )
        return name, part
    records = sorted(registry.records("launcher"), key=lambda record: (record.order, record.name))
    found: tuple[LauncherSpec, NodePart] | None = None
    for record in records:
        if found is not None and record.order > found[0].order:
            break
        part = _asked(registry, record, environment)
        if part is not None and found is not None:
            raise ConfigError(
                f"two launchers of order {record.order} recognise this process: {_described(found[0])} and "
                f"{_described(record)}; name one with --launcher"
            )
        if part is not None:
            found = record, part
    if found is None:
        raise ConfigError(
            "no launcher was found: the variables of none are set: "
            f"{', '.join(map(_described, records)) or 'none is installed'}. Run this command through one of them on "
            "every node, or run `ray start` manually"
        )
    return found[0].name, found[1]


def _asked(registry: PluginRegistry, record: LauncherSpec, environment: Mapping[str, str]) -> NodePart | None:
    try:
        part = registry.load_factory(record, "function")(environment)
    except ConfigError as error:
        raise ConfigError(f"launcher {record.name!r}: {error}") from error
    except PluginError:
        raise
    except Exception as error:  # a plugin's code may raise anything
        raise PluginError(
            f"The launcher {record.name!r} ({registry.origin(record)}) failed: {type(error).__name__}: {error}\n"
            "  Name another with --launcher, or repair it."
        ) from error
    if part is not None and not isinstance(part, NodePart):
        raise PluginError(
            f"The launcher {record.name!r} ({registry.origin(record)}) returned a {type(part).__name__}; it must "
            "return a NodePart or None."
        )
    return part


def _described(record: LauncherSpec) -> str:
    return f"{record.name} ({', '.join(record.recognised_by)})"
