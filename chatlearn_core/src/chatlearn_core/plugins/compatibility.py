"""Compatibility of trainer, generator and transport, derived from their records alone; imports no plugin code.

No pair has code of its own. A trainer declares its exports, a generator the channels it loads from, and a transport
its requirements, its channels and its reach.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from chatlearn_core.exceptions import PluginIncompatibleError
from chatlearn_core.plugins.records import (
    Channel,
    Export,
    GeneratorSpec,
    KvAfterSync,
    Payload,
    Placement,
    Reach,
    RuntimeSpec,
    TrainerSpec,
    WeightSyncSpec,
)

BOX_CHANNELS: frozenset[Channel] = frozenset({"boxes", "tensors"})
"""Channels that can deliver boxes: unchanged, or assembled into whole tensors."""
FULL_CHANNELS: frozenset[Channel] = frozenset(get_args(Channel)) - {"boxes"}
DISTANCE: dict[Placement, int] = {"process": 0, "host": 1, "hosts": 2, "anywhere": 2}
REACH_TEXT: dict[Reach, str] = {"process": "within one process", "host": "within one host", "anywhere": "between hosts"}
PLACEMENT_TEXT: dict[Placement, str] = {
    "process": "share a process",
    "host": "share a host but not a process",
    "hosts": "are on several hosts, every replica beside ranks of the trainer",
    "anywhere": "are on different hosts",
}


@dataclass(slots=True, frozen=True)
class RoleSize:
    """The settings of a role that determine its placement, known from the configuration before anything is placed."""

    name: str
    kind: str
    device: str
    replicas: int
    ranks: int
    devices: int
    """Devices per worker: one for a trainer rank, the engine's devices for a generator replica."""

    @staticmethod
    def of(name: str, kind: str, role: Any, record: TrainerSpec | GeneratorSpec) -> RoleSize:
        """The size of a role with these settings (``RoleConfig`` or ``RolePlan``) and its backend's record."""
        devices = 1
        if isinstance(record, GeneratorSpec):
            engine: Mapping[str, Any] = role.engine
            given = [engine[name] for names in record.device_arguments for name in names if name in engine]
            counts = [value for value in given if isinstance(value, int) and value >= 1]
            devices = math.prod(counts) if counts else role.ranks
        return RoleSize(name, kind, role.device, role.replicas, role.ranks, devices)


def placement_of(
    runtime: RuntimeSpec, options: object, trainer: RoleSize | None = None, generator: RoleSize | None = None
) -> Placement:
    """The placements of a trainer and a generator that a runtime with these options may choose."""
    between = getattr(options, "placement_between", None)
    if between is not None and trainer is not None and generator is not None:
        found: Placement = between(trainer, generator)
        return found
    placement: Placement = getattr(options, "placement", runtime.placement)
    return placement


def share_gpus(options: object, trainer: RoleSize, generator: RoleSize, trainer_options: object) -> bool:
    """Whether the trainer certainly has weights on every GPU that the generator's engines use.

    Args:
        options: the runtime's options; their method ``same_gpus_between(trainer, generator)`` knows the placement.
            Without this method nothing is certain.
        trainer: sizes of the trainer role.
        generator: sizes of the generator role.
        trainer_options: an attribute ``weights_on_device`` that is False says that the weights stay on the host.
    """
    between = getattr(options, "same_gpus_between", None)
    return between is not None and getattr(trainer_options, "weights_on_device", True) and between(trainer, generator)


def bases_of(generator: GeneratorSpec, options: object) -> frozenset[str]:
    """Possible bases of the logprobs of a generator with these options (see ``GeneratorSpec.bases``)."""
    bases: frozenset[str] = getattr(options, "bases", generator.bases)
    return bases


def returns_kept_ids(generator: GeneratorSpec, options: object) -> bool:
    """Whether a generator with these options returns the ids that it sampled from (see ``GeneratorSpec.kept_ids``)."""
    return bool(getattr(options, "kept_ids", generator.kept_ids))


def classifies(generator: GeneratorSpec, options: object) -> bool:
    """Whether a generator with these options serves a sequence classifier (see ``GeneratorSpec.classifies``)."""
    return bool(getattr(options, "classifies", generator.classifies))


def kv_after_sync_of(generator: GeneratorSpec, options: object) -> KvAfterSync:
    """``GeneratorSpec.kv_after_sync`` of a generator with these options."""
    policy: KvAfterSync = getattr(options, "kv_after_sync", generator.kv_after_sync)
    return policy


def reaches(transport: WeightSyncSpec, placement: Placement) -> bool:
    """Whether a transport can connect ends with this placement."""
    if placement == "hosts" and transport.reach == "host":
        return transport.within_hosts
    return DISTANCE[transport.reach] >= DISTANCE[placement]


def shared_way(
    trainer: TrainerSpec,
    generator: GeneratorSpec | TrainerSpec,
    transport: WeightSyncSpec,
    placement: Placement = "process",
    payload: Payload = "full",
    export: Export | None = None,
    options: object = None,
) -> tuple[Export, Channel] | None:
    """The form in which the weights leave the trainer and the channel that passes them to the generator; None if the
    transport fits neither.

    Takes boxes if the trainer's options spread a model's layers or matrices over ranks, which then need not gather
    them; otherwise the transport's first choice among the forms that the trainer exports. Then the transport's first
    choice among the channels through which the generator accepts the payload.

    Args:
        trainer: record of the trainer that sends the weights.
        generator: record of the role that receives them: a generator, or a trainer that is refreshed.
        transport: record of the transport.
        placement: the distance between the two ends.
        payload: the payload to send.
        export: the requested form; None means any.
        options: the trainer's options.
    """
    for form in shared_exports(trainer, transport, placement, payload, export, options):
        for channel in _delivered(transport, form):
            if channel in channels_for(generator, payload):
                return form, channel
    return None


def _delivered(transport: WeightSyncSpec, export: Export) -> list[Channel]:
    """The channels through which a transport delivers weights carried in this form, best first."""
    carried = BOX_CHANNELS if export == "boxes" else FULL_CHANNELS
    return [channel for channel in transport.channels if channel in carried]


def shared_exports(
    trainer: TrainerSpec,
    transport: WeightSyncSpec,
    placement: Placement,
    payload: Payload,
    export: Export | None,
    options: object = None,
) -> list[Export]:
    """The forms in which a transport can carry a trainer's payload over this placement, the best first.

    Adapters are small and are always sent whole. With placement ``hosts`` each host takes everything from its own
    ranks, which have whole tensors but not the boxes of ranks on other hosts.
    """
    whole_only = payload == "adapter" or (placement == "hosts" and transport.reach == "host")
    forms = [form for form in transport.exports if form in trainer.exports and export in (None, form)]
    forms = [form for form in forms if form == "full_tensors" or not whole_only]
    sizes = [getattr(options, trainer.parallel[way], 1) for way in ("tp", "pp", "ep") if way in trainer.parallel]
    return sorted(forms, key=lambda form: form != "boxes") if any(size > 1 for size in sizes) else forms


def channels_for(generator: GeneratorSpec | TrainerSpec, payload: Payload) -> frozenset[Channel]:
    """The channels through which a generator, or a trainer that is refreshed, accepts a payload."""
    if isinstance(generator, TrainerSpec):
        return generator.channels if payload == "full" else frozenset()
    return (generator.adapter_channels if payload == "adapter" else frozenset()) or generator.channels


def mismatches(
    trainer: TrainerSpec,
    generator: GeneratorSpec | TrainerSpec,
    transport: WeightSyncSpec,
    placement: Placement,
    payload: Payload = "full",
    *,
    export: Export | None = None,
    rolling: bool = False,
    devices: Collection[str] = (),
) -> list[str]:
    """Reasons why a transport cannot carry this trainer's weights to this generator; each names both sides.

    Args:
        trainer: record of the trainer that sends the weights.
        generator: record of the role that receives them: a generator, or a trainer that is refreshed.
        transport: record of the transport.
        placement: the distance between the two ends: one process, one host, several hosts with trainer ranks beside
            every replica (``hosts``), or different hosts (``anywhere``).
        payload: the payload to send.
        export: the requested form; None means any.
        rolling: whether replicas change their weights one after another.
        devices: both ends' devices from the configuration; ``auto`` may be a GPU.

    Returns:
        One line per reason; empty if they fit.
    """
    offered = " or ".join(map(repr, transport.channels))
    delivery = f"transport {transport.name!r} delivers by channel {offered} {REACH_TEXT[transport.reach]}"
    reasons = []
    carries = f"transport {transport.name!r} carries export {' or '.join(map(repr, transport.exports))}"
    if transport.whole_only is not None:
        carries += f" ({transport.whole_only})"
    exports = f"trainer {trainer.name!r} exports {quoted(trainer.exports)}"
    if not shared_exports(trainer, transport, "process", "full", None):
        reasons.append(f"{carries}; {exports}")
    elif not shared_exports(trainer, transport, "process", "full", export):
        reasons.append(f"export {export!r} is asked for (weight_sync.export); {carries}; {exports}")
    elif not shared_exports(trainer, transport, placement, payload, export):
        what = "adapters travel whole" if payload == "adapter" else "boxes do not reach the other hosts"
        reasons.append(f"{carries}, and {what}; {exports}")
    forms = shared_exports(trainer, transport, placement, payload, export) or transport.exports
    if not channels_for(generator, payload) & {channel for form in forms for channel in _delivered(transport, form)}:
        takes = f"takes {'adapters by ' if payload == 'adapter' else ''}channels"
        receiver = f"{generator.kind} {generator.name!r}"
        reasons.append(f"{delivery}; {receiver} {takes} {quoted(channels_for(generator, payload))}")
    if not reaches(transport, placement):
        reasons.append(
            f"{delivery}; trainer {trainer.name!r} and {generator.kind} {generator.name!r} {PLACEMENT_TEXT[placement]}"
        )
    if transport.needs_gpus and "cpu" in devices:
        reasons.append(f"transport {transport.name!r} needs both ends on GPUs; one of the two has device 'cpu'")
    sides = (("trainer", trainer), ("transport", transport), (generator.kind, generator))
    if any(payload not in record.payloads for _, record in sides):
        offers = ", ".join(f"{side} {record.name!r} {quoted(record.payloads)}" for side, record in sides)
        reasons.append(f"payload {payload!r} is asked for; payloads are: {offers}")
    if rolling and not transport.per_replica:
        reasons.append(
            f"transport {transport.name!r} moves the weights to all replicas in one collective; the fleet rule "
            "'rolling' brings them to a few at a time"
        )
    return reasons


def choose_transport(
    trainer: TrainerSpec,
    generator: GeneratorSpec | TrainerSpec,
    transports: Sequence[WeightSyncSpec],
    placement: Placement,
    payload: Payload = "full",
    *,
    export: Export | None = None,
    rolling: bool = False,
    devices: Collection[str] = (),
    same_gpus: bool = False,
) -> tuple[WeightSyncSpec, str]:
    """The fastest transport that fits (lowest ``speed_rank``, then by name), and a sentence that says why.

    Args:
        trainer: record of the trainer that sends the weights.
        generator: record of the role that receives them: a generator, or a trainer that is refreshed.
        transports: the candidates.
        placement: as for ``mismatches``; so are ``payload``, ``export``, ``rolling`` and ``devices``.
        payload: the payload to send.
        export: the requested form.
        rolling: whether replicas change their weights one after another.
        devices: devices of both ends.
        same_gpus: whether both ends certainly use the same GPUs (``share_gpus``).

    Raises:
        PluginIncompatibleError: none fits; names for each transport what each side offers.
    """
    ranked = sorted(transports, key=lambda transport: (transport.speed_rank, transport.name))
    reasons = {
        transport.name: mismatches(
            trainer, generator, transport, placement, payload, export=export, rolling=rolling, devices=devices
        )
        for transport in ranked
    }
    for transport in ranked:
        if transport.by_name_only is not None and not reasons[transport.name]:
            reasons[transport.name] = [f"it is taken by name only: {transport.by_name_only}"]
        elif transport.needs_same_gpus and not same_gpus and not reasons[transport.name]:
            reasons[transport.name] = ["the runtime is not certain that both ends are on the same GPUs"]
    fitting = [transport for transport in ranked if not reasons[transport.name]]
    ends = f"trainer {trainer.name!r} and {generator.kind} {generator.name!r}, which {PLACEMENT_TEXT[placement]}"
    if not fitting:
        lines = [f"  {name}: {reason}" for name, why in reasons.items() for reason in why]
        raise PluginIncompatibleError(
            f"No weight sync fits {ends}.\n"
            + ("\n".join(lines) if lines else "  No weight sync is installed.")
            + "\n  Install a transport that fits, place the roles nearer to each other, or choose another backend."
        )
    best = fitting[0]
    why = f"{best.name!r} is the fastest weight sync for {ends}"
    if fitting[1:]:
        why += f"; {', '.join(transport.name for transport in fitting[1:])} would also fit"
    refused = [f"{name} does not fit ({'; '.join(why_not)})" for name, why_not in reasons.items() if why_not]
    return best, "; ".join([why, *refused])


def quoted(words: Collection[str]) -> str:
    """Words of a declared set, sorted and quoted."""
    return ", ".join(repr(word) for word in sorted(words)) or "nothing"
