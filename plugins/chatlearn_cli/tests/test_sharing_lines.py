from __future__ import annotations

from chatlearn_cli.sharing_lines import sharing_lines
from chatlearn_core.executor.device_sharing import Move, ScheduledDeviceUse, Sharing
from chatlearn_core.protocols import Device

GPU0, GPU1 = Device("node, GPU 0", True), Device("node, GPU 1", True)


def sharing(*devices: Device) -> Sharing:
    return Sharing({role: frozenset(devices) for role in ("generator", "trainer")})


def test_people_are_told_who_takes_turns_and_what_moves() -> None:
    moves = (Move("offload", "trainer", ("weights",)), Move("onload", "generator", ("kv_cache",)))
    uses = [ScheduledDeviceUse("generator.generate", 0, moves), ScheduledDeviceUse("reference.logprobs", 1, ())]
    lines = sharing_lines(sharing(GPU0), uses)
    assert lines[0] == f"generator, trainer take turns on {GPU0.place}"
    assert lines[1].split() == (
        ["before", "generator.generate", "offload", "trainer", "(weights);", "onload", "generator", "(kv_cache)"]
    )
    assert lines[2].split() == ["before", "reference.logprobs", "nothing", "moves"]
    assert "nothing is moved" in sharing_lines(Sharing(), [])[0]


def test_devices_with_the_same_guests_are_told_together() -> None:
    told = f"generator, trainer take turns on {GPU0.place} and 1 more, up to {GPU1.place}"
    assert sharing_lines(sharing(GPU0, GPU1), []) == [told]
