"""Starts, streams, checkpoints and errors of several ranks on gloo."""

import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.sharding import box_of_rows, mesh_sizes
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_hf.checkpoint_names import checkpoint_layout, expected_manifest
from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_hosting.reserved_port import ReservedPort
from chatlearn_testing.listeners import listeners

EVERYTHING = [list(range(7))]
DP2, DP4 = [[0, 1, 2, 3, 4, 5], [6]], [[0, 1], [2, 3, 4], [5, 6], []]
TP2 = {"tensor_parallel": 2}
LORA = {"lora": {"rank": 4, "alpha": 8.0}}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("sharding")
    build_tiny_model(root / "dense", "qwen3")
    build_tiny_model(root / "mixture", "qwen3_moe")
    return root


@pytest.fixture(scope="module")
def answers(run_jobs, seven_sequences, paths):
    dense = {"model": str(paths / "dense"), "weights": True}
    adapted = dense | {"updates": 2}
    jobs = {
        # The budget cuts the first slice into more micro-batches than the second, which must keep in step.
        "dense": dense | {"slices": DP2, "options": {"max_tokens_per_micro_batch": 64}},
        "mixture": {"model": str(paths / "mixture"), "slices": DP2, "weights": True, "export": str(paths / "export")},
        "untrained": dense | {"slices": DP2, "options": TP2, "updates": 0, "export": str(paths / "untrained")},
        "poison": dense | {"slices": [[0, 1, 2], [3, 4, 5, 6]], "poison": "s1"},
    }
    for kind, options in (("", {}), ("tensor-", TP2)):
        job = dense | {"slices": DP2, "options": options}
        save = {name: str(paths / f"{kind}{name}") for name in ("waited", "beside")}
        jobs[f"{kind}beside"] = job | {"save": save["waited"], "save_beside": save["beside"]}
        for name, directory in save.items():
            jobs[f"load-{kind}{name}"] = job | {"load": directory}
    worlds = {
        "one": (EVERYTHING, {}),
        "dp4": (DP4, {}),
        "hsdp": (DP4, {"dp_replicate": 2}),
        "ulysses": (DP2, {"ulysses": 2}),
        "tensor": (DP2, TP2),
    }
    for world, (slices, sizes) in worlds.items():
        jobs[f"save-{world}"] = dense | {"slices": slices, "options": sizes, "save": str(paths / world)}
        if world == "tensor":
            continue
        jobs[f"lora-{world}"] = adapted | {
            "slices": slices,
            "options": sizes | LORA,
            "save": str(paths / f"lora-{world}"),
        }
    uneven = {"slices": [[0, 1, 2], [3, 4, 5], [6]], "options": TP2}  # 32 rows of a part over 3 ranks
    jobs["save-uneven"] = dense | uneven | {"save": str(paths / "uneven")}
    jobs["load-uneven"] = dense | {"slices": EVERYTHING, "load": str(paths / "uneven"), "updates": 0}
    jobs["load-tensor"] = dense | {"slices": EVERYTHING, "load": str(paths / "tensor")}
    jobs["load-into-tensor"] = dense | {"slices": DP2, "options": TP2, "load": str(paths / "dp4")}
    for saved, resumed in (("one", "hsdp"), ("hsdp", "one"), ("dp4", "ulysses"), ("ulysses", "dp4")):
        slices, sizes = worlds[resumed]
        jobs[f"load-{saved}"] = dense | {"slices": slices, "options": sizes, "load": str(paths / saved)}
        jobs[f"load-lora-{saved}"] = dense | {
            "slices": slices,
            "options": sizes | LORA,
            "load": str(paths / f"lora-{saved}"),
        }
    return run_jobs(jobs, seven_sequences, paths / "answers")


several_ranks = [pytest.mark.engine, pytest.mark.slow]


class TestSeveralRanks:
    pytestmark = several_ranks

    def test_a_rank_reads_its_own_rows_only(self, answers, paths) -> None:
        for job, model in (("dense", "dense"), ("mixture", "mixture")):
            specs = expected_manifest(paths / model).tensors.values()
            total = sum(torch.Size(spec.shape).numel() for spec in specs)
            read = [rank["elements_read"] for rank in answers[job]]
            assert sum(read) == total
            assert max(read) < 0.55 * total

    def test_tensor_parallel_ranks_read_their_own_parts_only(self, answers, paths) -> None:
        tensors = load_file(paths / "dense" / "model.safetensors")
        copied = sum(tensor.numel() for name, tensor in tensors.items() if "layers" in name and "norm" in name)
        read = [rank["elements_read"] for rank in answers["untrained"]]
        total = sum(tensor.numel() for tensor in tensors.values())
        assert sum(read) == total + copied, "two ranks hold each norm of a layer"
        assert max(read) < 0.3 * total

    def test_tensor_parallel_ranks_stream_and_export_what_they_read_to_the_bit(self, answers, paths) -> None:
        expected = load_file(paths / "dense" / "model.safetensors")
        exported = load_file(paths / "untrained" / "model.safetensors")
        for found in (exported, *(rank["full"] for rank in answers["untrained"])):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        boxes = [box for rank in answers["untrained"] for box in rank["boxes"]]
        assert any(box[1] != (0, shape[1]) for _, shape, box, _, _ in boxes if len(shape) > 1), "columns are split"

    @pytest.mark.parametrize("job", ["dense", "mixture", "untrained", "save-tensor", "save-uneven"])
    def test_both_streams_hold_every_element_once(self, answers, job) -> None:
        full = answers[job][0]["full"]
        count = {name: torch.zeros(tensor.shape) for name, tensor in full.items()}
        for owner, rank in enumerate(answers[job]):
            for name, shape, box, owner_rank, tensor in rank["boxes"]:
                place = tuple(slice(*side) for side in box)
                assert owner_rank == owner
                assert tuple(shape) == tuple(full[name].shape)
                assert torch.equal(full[name][place], tensor), name
                count[name][place] += 1
        assert all(bool((seen == 1).all()) for seen in count.values())

    def test_after_a_forward_a_rank_holds_its_shards_and_nothing_gathered(self, answers) -> None:
        whole = sum(tensor.nbytes for tensor in answers["dense"][0]["full"].values())
        for rank in answers["dense"]:
            assert rank["live_bytes"] < 0.6 * whole, "half, and what rounding to whole rows and buffers add"

    def test_offloading_frees_the_shards_and_brings_them_back(self, answers) -> None:
        for rank in answers["dense"]:
            assert rank["offloaded_bytes"] == 0
            assert all(torch.equal(rank["again"][name], rank["full"][name]) for name in rank["full"])

    def test_ranks_agree_on_micro_batches(self, answers) -> None:
        assert [rank["metrics"]["perf/micro_batches"] for rank in answers["dense"]] == [2, 1]

    @pytest.mark.parametrize("job", ["save-ulysses", "save-tensor"])
    def test_ranks_that_share_a_slice_report_it_once(self, answers, job) -> None:
        assert [bool(rank["metrics"]) for rank in answers[job]] == [True, False, True, False]
        tokens = sum(rank["metrics"].get("perf/tokens", 0) for rank in answers[job])
        assert tokens == answers["save-one"][0]["metrics"]["perf/tokens"]

    def test_the_export_computes_the_same_as_the_trainer(self, answers, paths, seven_sequences) -> None:
        exported = load_causal_lm(str(paths / "export"), attention="sdpa")
        rank = answers["mixture"][1]
        (only,) = DP2[1]
        start, stop = seven_sequences.cu_seqlens[only], seven_sequences.cu_seqlens[only + 1]
        ids = seven_sequences.token_ids[start:stop]
        with torch.no_grad():
            logs = torch.log_softmax(exported(ids[None]).logits[0] / 0.7, -1)
        expected = torch.cat([logs.new_zeros(1), logs[:-1].gather(-1, ids[1:, None])[:, 0]])
        expected = expected * seven_sequences.loss_mask[start:stop]
        torch.testing.assert_close(rank["computed_after"]["logprobs"], expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("kind", ["", "tensor-"])
    def test_a_checkpoint_written_beside_an_update_resumes_as_one_that_was_waited_for(
        self, answers, paths, kind
    ) -> None:
        """Both were saved after the first update; after one more, all three are equal to the bit."""
        names = (f"{kind}beside", f"load-{kind}waited", f"load-{kind}beside")
        trained, waited, beside = (answers[job] for job in names)
        for rank in (0, 1):
            for name, tensor in trained[rank]["full"].items():
                assert torch.equal(waited[rank]["full"][name], tensor), name
                assert torch.equal(beside[rank]["full"][name], tensor), name
        told = {name for rank in trained for name in rank["written"]}
        assert told == {str(path.relative_to(paths / names[0])) for path in (paths / names[0]).rglob("*.*")}

    @pytest.mark.parametrize(
        ("saved", "kind"),
        [(saved, kind) for saved in ("one", "hsdp", "dp4", "ulysses") for kind in ("", "lora-")]
        + [("tensor", ""), ("into-tensor", "")],
    )
    def test_any_world_resumes_from_any_other(self, answers, seven_sequences, saved, kind) -> None:
        """One more update after loading: the same, wherever the checkpoint came from and wherever it goes on."""
        ranks, reference = answers[f"load-{kind}{saved}"], answers[f"load-{kind}one"]
        first = answers[f"{kind}{saved}" if kind else f"save-{saved.removeprefix('into-')}"][0]
        assert ranks[0]["metrics"]["grad_norm"] == pytest.approx(reference[0]["metrics"]["grad_norm"], rel=1e-3)
        assert ranks[0]["metrics"]["grad_norm"] != pytest.approx(first["metrics"]["grad_norm"], rel=1e-3)
        for name, tensor in reference[0]["full"].items():
            torch.testing.assert_close(ranks[0]["full"][name], tensor, atol=2e-5, rtol=0)

    def test_parts_of_unequal_size_are_saved_whole(self, answers) -> None:
        saved, loaded = answers["save-uneven"], answers["load-uneven"]
        sizes = [{name: tensor.numel() for name, _, _, _, tensor in rank["boxes"]} for rank in saved]
        assert any(rank[name] != size for rank in sizes for name, size in sizes[0].items() if name in rank)
        for rank in (*saved, *loaded):
            assert all(torch.equal(rank["full"][name], tensor) for name, tensor in saved[0]["full"].items())

    def test_a_checkpoint_of_adapters_holds_no_base_weights(self, answers, paths) -> None:
        def size(directory):
            return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())

        assert size(paths / "lora-one") < 0.5 * size(paths / "one")

    def test_a_bad_loss_on_one_rank_stops_both_and_changes_nothing(self, answers, paths) -> None:
        ranks = answers["poison"]
        assert "samples s0, s1, s2" in ranks[0]["error"]
        assert "on another rank" in ranks[1]["error"]
        before = load_causal_lm(str(paths / "dense")).state_dict()
        assert all(torch.equal(before[name], tensor) for name, tensor in ranks[0]["full"].items())


@pytest.mark.engine
def test_a_rendezvous_by_tcp_with_all_ranks_there(model_path, make_batch, policy_loss) -> None:
    with ReservedPort() as port:
        address = f"tcp://127.0.0.1:{port.number}"
        context = RoleContext("trainer", ModelSource(model_path, model_path), rendezvous=address, trainable=True)
        trainer = FSDPTrainer(FSDPOptions(cpu_offload=True), context)
        trainer.setup()
        listening = listeners([os.getpid()])
    try:
        assert all(one.is_local for one in listening), "the ranks of one host meet on loopback"
        assert port.number in {one.port for one in listening}
        assert trainer.update(make_batch(), policy_loss)["grad_norm"].value > 0
    finally:
        trainer.close()


@pytest.mark.engine
def test_a_model_without_views_of_its_checkpoint_is_loaded_whole_with_a_warning(
    make_trainer, make_batch, policy_loss, weights_of, monkeypatch, caplog
) -> None:
    expected = weights_of(make_trainer())

    def layout_without_views(model):
        layout = checkpoint_layout(model)
        first, *rest = layout.tensors
        return replace(layout, tensors=(replace(first, parts=None), *rest))

    monkeypatch.setattr("chatlearn_fsdp.model_start.checkpoint_layout", layout_without_views)
    trainer = make_trainer(cpu_offload=True)
    assert "stores model.embed_tokens.weight in another form" in caplog.text
    ours = weights_of(trainer)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert {shard.name for shard in trainer.weights("boxes")} == expected.keys()
    trainer.update(make_batch(), policy_loss)


@pytest.mark.parametrize(
    ("options", "world_size", "sizes"),
    [
        ({}, 8, (1, 8, 1)),
        ({"dp_replicate": 2, "ulysses": 2}, 8, (2, 2, 2)),
        ({"dp_replicate": 4, "dp_shard": 1}, 4, (4, 1, 1)),
        ({"zero_stage": 0, "ulysses": 2}, 8, (4, 1, 2)),
        ({"ring": 4}, 8, (1, 2, 4)),
        ({"zero_stage": 1, "dp_replicate": 2}, 8, (2, 4, 1)),
        ({"tensor_parallel": 2}, 8, (1, 4, 2)),
        ({"tensor_parallel": 2, "dp_replicate": 2}, 8, (2, 2, 2)),
        ({"tensor_parallel": 4, "zero_stage": 0}, 8, (2, 1, 4)),
    ],
)
def test_sizes_are_filled_in(options, world_size, sizes) -> None:
    assert mesh_sizes(FSDPOptions(**options), RoleContext("trainer", world_size=world_size)) == sizes


@pytest.mark.parametrize("options", [{"ulysses": 3}, {"tensor_parallel": 3}, {"dp_shard": 2}, {"dp_replicate": 16}])
def test_sizes_that_do_not_multiply_to_the_ranks_are_refused(options) -> None:
    with pytest.raises(ConfigError, match=r"roles\.trainer\.options: dp_replicate .* but the role has ranks: 8"):
        mesh_sizes(FSDPOptions(**options), RoleContext("trainer", world_size=8))


def test_rows_of_a_fused_tensor_that_lie_in_a_shard() -> None:
    fused = torch.empty(4, 6, 5, device="meta")
    up_of_expert_2 = fused.chunk(2, dim=1)[1].select(0, 2)
    assert box_of_rows(up_of_expert_2, (2, 4), 30) == (0, 3)
    assert box_of_rows(up_of_expert_2, (0, 2), 30) == (0, 0)
    plain = torch.empty(7, 5, device="meta")
    assert box_of_rows(plain, (4, 7), 5) == (4, 7)
