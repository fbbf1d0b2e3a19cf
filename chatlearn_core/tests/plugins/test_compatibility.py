from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from chatlearn_core.exceptions import PluginIncompatibleError
from chatlearn_core.plugins.compatibility import (
    RoleSize,
    choose_transport,
    mismatches,
    share_gpus,
    shared_exports,
    shared_way,
)
from chatlearn_core.plugins.records import GeneratorSpec, TrainerSpec, WeightSyncSpec


def transport(name: str, **arguments) -> WeightSyncSpec:
    return WeightSyncSpec(name=name, sender="m:S", receiver="m:R", options="m:O", **arguments)


TRAINER = TrainerSpec(name="fsdp", factory="m:F", options="m:O", exports=frozenset({"full_tensors"}))
GENERATOR = GeneratorSpec(name="vllm", factory="m:F", options="m:O", channels=frozenset({"tensors", "checkpoint"}))
DIRECT = transport("direct", channels=("tensors",), reach="process", speed_rank=10)
SHARED = transport("shared_memory", channels=("tensors",), reach="host", speed_rank=20)
BESIDE = replace(SHARED, name="beside", within_hosts=True)
CHECKPOINT = transport("checkpoint", channels=("checkpoint",), reach="anywhere", speed_rank=90)
BOXES = transport("boxes", exports=("boxes",), channels=("boxes",), reach="anywhere", speed_rank=1)
ALL = (CHECKPOINT, BOXES, SHARED, DIRECT)


@pytest.mark.parametrize(
    ("sync", "placement", "fits"),
    [
        (DIRECT, "process", True),
        (DIRECT, "host", False),
        (DIRECT, "anywhere", False),
        (SHARED, "process", True),
        (SHARED, "host", True),
        (SHARED, "anywhere", False),
        (SHARED, "hosts", False),
        (BESIDE, "host", True),
        (BESIDE, "hosts", True),
        (BESIDE, "anywhere", False),
        (CHECKPOINT, "hosts", True),
        (DIRECT, "hosts", False),
        (CHECKPOINT, "process", True),
        (CHECKPOINT, "anywhere", True),
    ],
)
def test_reach(sync, placement, fits: bool) -> None:
    assert (mismatches(TRAINER, GENERATOR, sync, placement) == []) is fits


def test_auto_keeps_bytes_within_hosts_where_every_replica_is_beside_ranks() -> None:
    chosen, why = choose_transport(TRAINER, GENERATOR, (CHECKPOINT, SHARED, BESIDE), "hosts")
    assert chosen.name == "beside"
    assert "which are on several hosts, every replica beside ranks of the trainer" in why
    assert "shared_memory does not fit" in why


def test_the_size_of_a_role_is_what_its_engine_drives() -> None:
    record = replace(GENERATOR, device_arguments=(("tensor_parallel_size", "tp_size"), ("pp_size",)))
    settings = SimpleNamespace(device="cuda", replicas=3, ranks=1, engine={"tp_size": 4, "pp_size": 2})
    assert RoleSize.of("generator", "generator", settings, record) == RoleSize(
        "generator", "generator", "cuda", 3, 1, 8
    )
    settings.engine, settings.ranks = {}, 2
    assert RoleSize.of("generator", "generator", settings, record).devices == 2
    assert RoleSize.of("trainer", "trainer", settings, TRAINER).devices == 1


def test_each_reason_names_both_sides() -> None:
    generator = replace(GENERATOR, channels=frozenset({"checkpoint", "process_group"}))
    assert mismatches(TRAINER, generator, DIRECT, "host") == [
        "transport 'direct' delivers by channel 'tensors' within one process; "
        "generator 'vllm' takes channels 'checkpoint', 'process_group'",
        "transport 'direct' delivers by channel 'tensors' within one process; "
        "trainer 'fsdp' and generator 'vllm' share a host but not a process",
    ]
    assert mismatches(TRAINER, replace(GENERATOR, channels=frozenset({"boxes"})), BOXES, "process") == [
        "transport 'boxes' carries export 'boxes'; trainer 'fsdp' exports 'full_tensors'"
    ]


def test_a_payload_must_be_taken_by_all_three() -> None:
    assert mismatches(
        TRAINER, GENERATOR, replace(DIRECT, payloads=frozenset({"full", "delta"})), "process", "delta"
    ) == [
        "payload 'delta' is asked for; payloads are: "
        "trainer 'fsdp' 'full', transport 'direct' 'delta', 'full', generator 'vllm' 'full'"
    ]


@pytest.mark.parametrize(
    ("placement", "name"), [("process", "direct"), ("host", "shared_memory"), ("anywhere", "checkpoint")]
)
def test_auto_takes_the_fastest_that_fits(placement, name: str) -> None:
    chosen, _ = choose_transport(TRAINER, GENERATOR, ALL, placement)
    assert chosen.name == name


def test_auto_says_why() -> None:
    _, why = choose_transport(TRAINER, GENERATOR, (CHECKPOINT, DIRECT, SHARED), "host")
    assert why == (
        "'shared_memory' is the fastest weight sync for trainer 'fsdp' and generator 'vllm', which share a host but "
        "not a process; checkpoint would also fit; direct does not fit (transport 'direct' delivers by channel "
        "'tensors' within one process; trainer 'fsdp' and generator 'vllm' share a host but not a process)"
    )


def test_equal_speed_is_decided_by_name() -> None:
    chosen, _ = choose_transport(TRAINER, GENERATOR, (transport("b"), transport("a")), "process")
    assert chosen.name == "a"


def test_no_fit_names_every_transport_and_why() -> None:
    with pytest.raises(PluginIncompatibleError) as caught:
        choose_transport(TRAINER, GENERATOR, (DIRECT, BOXES), "anywhere")
    message = str(caught.value)
    assert message.startswith("No weight sync fits trainer 'fsdp' and generator 'vllm', which are on different hosts.")
    assert "\n  direct: transport 'direct' delivers by channel 'tensors' within one process; " in message
    assert "\n  boxes: transport 'boxes' carries export 'boxes'; trainer 'fsdp' exports 'full_tensors'" in message


def test_no_transport_at_all() -> None:
    with pytest.raises(PluginIncompatibleError, match="No weight sync is installed"):
        choose_transport(TRAINER, GENERATOR, (), "process")


def test_the_first_channel_that_the_generator_takes_is_used() -> None:
    sync = transport("any", channels=("memory_handles", "tensors"))
    handles = replace(GENERATOR, channels=frozenset({"tensors", "memory_handles"}))
    assert shared_way(TRAINER, GENERATOR, sync) == ("full_tensors", "tensors")
    assert shared_way(TRAINER, handles, sync) == ("full_tensors", "memory_handles")
    assert shared_way(TRAINER, replace(GENERATOR, channels=frozenset({"checkpoint"})), sync) is None
    [reason] = mismatches(TRAINER, replace(GENERATOR, channels=frozenset({"checkpoint"})), sync, "process")
    assert reason.startswith("transport 'any' delivers by channel 'memory_handles' or 'tensors' between hosts; ")


def test_a_collective_does_not_roll() -> None:
    collective = transport("collective", per_replica=False, speed_rank=1)
    [reason] = mismatches(TRAINER, GENERATOR, collective, "process", rolling=True)
    assert "moves the weights to all replicas in one collective" in reason
    chosen, why = choose_transport(TRAINER, GENERATOR, (collective, CHECKPOINT), "anywhere", rolling=True)
    assert chosen.name == "checkpoint"
    assert "collective does not fit (transport 'collective' moves the weights to all" in why
    assert choose_transport(TRAINER, GENERATOR, (collective, CHECKPOINT), "anywhere")[0].name == "collective"


def test_auto_leaves_out_what_must_be_named() -> None:
    special = transport("special", by_name_only="it needs a moon", speed_rank=1)
    assert mismatches(TRAINER, GENERATOR, special, "process") == []
    chosen, why = choose_transport(TRAINER, GENERATOR, (special, CHECKPOINT), "process")
    assert chosen.name == "checkpoint"
    assert "special does not fit (it is taken by name only: it needs a moon)" in why


@pytest.mark.parametrize(
    ("placement", "same_gpus", "devices", "name"),
    [
        ("host", True, ("cuda", "cuda"), "ipc"),
        ("hosts", True, ("auto", "auto"), "ipc"),
        ("host", False, ("cuda", "cuda"), "beside"),
        ("host", True, ("cuda", "cpu"), "beside"),
        ("anywhere", True, ("cuda", "cuda"), "checkpoint"),
        ("process", True, ("cuda", "cuda"), "direct"),
    ],
)
def test_auto_stays_on_the_gpu_where_both_ends_are_sure_to_share_it(
    placement, same_gpus: bool, devices: tuple[str, ...], name: str
) -> None:
    ipc = transport("ipc", reach="host", within_hosts=True, needs_gpus=True, needs_same_gpus=True, speed_rank=15)
    chosen, why = choose_transport(
        TRAINER, GENERATOR, (*ALL, BESIDE, ipc), placement, devices=devices, same_gpus=same_gpus
    )
    assert chosen.name == name or (chosen.name, name) == ("shared_memory", "beside"), why
    if not same_gpus:
        assert "ipc does not fit (the runtime is not certain that both ends are on the same GPUs)" in why
        assert mismatches(TRAINER, GENERATOR, ipc, placement, devices=devices) == [], "by name it is taken"


@pytest.mark.parametrize(
    ("runtime", "trainer", "expected"),
    [
        (SimpleNamespace(), SimpleNamespace(), False),
        (SimpleNamespace(same_gpus_between=lambda *sizes: True), SimpleNamespace(), True),
        (SimpleNamespace(same_gpus_between=lambda *sizes: False), SimpleNamespace(), False),
        (SimpleNamespace(same_gpus_between=lambda *sizes: True), SimpleNamespace(weights_on_device=False), False),
    ],
)
def test_gpus_are_shared_where_the_runtime_is_sure_and_the_weights_are_there(
    runtime: SimpleNamespace, trainer: SimpleNamespace, expected: bool
) -> None:
    sizes = [RoleSize(name, name, "cuda", 1, 1, 1) for name in ("trainer", "generator")]
    assert share_gpus(runtime, *sizes, trainer) is expected


@pytest.mark.parametrize(("devices", "fits"), [((), True), (("auto", "cuda:1"), True), (("cuda", "cpu"), False)])
def test_a_transport_that_needs_gpus_fits_no_end_on_a_cpu(devices: tuple[str, ...], fits: bool) -> None:
    transport = replace(DIRECT, needs_gpus=True)
    reasons = mismatches(TRAINER, GENERATOR, transport, "process", devices=devices)
    assert reasons == ([] if fits else ["transport 'direct' needs both ends on GPUs; one of the two has device 'cpu'"])


SHARDS = replace(TRAINER, exports=frozenset({"boxes"}))
BOTH = replace(TRAINER, exports=frozenset({"full_tensors", "boxes"}))
EITHER = transport("either", exports=("full_tensors", "boxes"), channels=("checkpoint", "boxes", "tensors"))


@pytest.mark.parametrize(
    ("trainer", "channels", "asked", "way"),
    [
        (TRAINER, {"tensors", "boxes"}, None, ("full_tensors", "tensors")),
        (BOTH, {"tensors", "boxes"}, None, ("full_tensors", "tensors")),
        (BOTH, {"tensors", "boxes"}, "boxes", ("boxes", "boxes")),
        (SHARDS, {"tensors", "boxes"}, None, ("boxes", "boxes")),
        (SHARDS, {"tensors", "checkpoint"}, None, ("boxes", "tensors")),  # put together by the receiver
        (BOTH, {"boxes"}, None, ("boxes", "boxes")),  # whole tensors have no channel
        (SHARDS, {"checkpoint"}, None, None),
        (TRAINER, {"tensors"}, "boxes", None),
    ],
)
def test_the_form_of_the_weights(trainer, channels, asked, way) -> None:
    generator = replace(GENERATOR, channels=frozenset(channels))
    assert shared_way(trainer, generator, EITHER, export=asked) == way
    assert (mismatches(trainer, generator, EITHER, "process", export=asked) == []) is (way is not None)


@pytest.mark.parametrize(
    ("options", "placement", "payload", "form"),
    [
        ({"stages": 2}, "host", "full", "boxes"),
        ({"stages": 1}, "host", "full", "full_tensors"),
        ({"stages": 1, "slices": 2}, "host", "full", "full_tensors"),  # each rank has whole tensors
        ({"stages": 2}, "hosts", "full", "full_tensors"),
        ({"stages": 2}, "host", "adapter", "full_tensors"),
    ],
)
def test_boxes_are_preferred_where_ranks_hold_parts(options, placement, payload, form) -> None:
    trainer = replace(BOTH, parallel={"pp": "stages", "dp": "slices"}, payloads=frozenset({"full", "adapter"}))
    beside = replace(BESIDE, exports=("full_tensors", "boxes"), channels=("boxes", "tensors"))
    assert shared_exports(trainer, beside, placement, payload, None, SimpleNamespace(**options))[0] == form


def test_a_form_that_was_asked_for_and_is_not_there_is_named() -> None:
    assert mismatches(TRAINER, GENERATOR, EITHER, "process", export="boxes") == [
        "export 'boxes' is asked for (weight_sync.export); transport 'either' carries export 'full_tensors' or "
        "'boxes'; trainer 'fsdp' exports 'full_tensors'"
    ]


def test_a_transport_says_why_it_carries_no_boxes() -> None:
    holder = replace(TRAINER, exports=frozenset({"full_tensors", "boxes"}))
    whole = replace(DIRECT, whole_only="one rank holds every tensor")
    [reason] = mismatches(holder, GENERATOR, whole, "process", export="boxes")
    assert "transport 'direct' carries export 'full_tensors' (one rank holds every tensor); trainer 'fsdp'" in reason


def test_boxes_do_not_leave_their_host_where_each_host_serves_itself() -> None:
    beside = replace(BESIDE, exports=("full_tensors", "boxes"), channels=("boxes", "tensors"))
    assert shared_way(SHARDS, GENERATOR, beside, "host") == ("boxes", "tensors")
    [reason] = mismatches(SHARDS, GENERATOR, beside, "hosts")
    assert "boxes do not reach the other hosts" in reason
    assert mismatches(BOTH, GENERATOR, beside, "hosts") == []


def test_adapters_travel_whole() -> None:
    sync = replace(EITHER, payloads=frozenset({"full", "adapter"}))
    trainer, generator = (replace(one, payloads=frozenset({"full", "adapter"})) for one in (SHARDS, GENERATOR))
    [reason] = mismatches(trainer, generator, sync, "process", "adapter")
    assert "adapters travel whole" in reason
