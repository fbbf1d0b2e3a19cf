"""New weights: checked, complete, exactly those of the trainer, and exact version spans."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import BackendError, WeightSyncError
from chatlearn_core.types import TensorSpec, VersionSpan, WeightManifest, WeightShard
from chatlearn_core.types.boxes import slices
from chatlearn_hf.checkpoint_names import checkpoint_tensors
from chatlearn_hf.tiny import build_tiny_model

pytestmark = pytest.mark.engine

PROMPT = np.array([21, 22, 23])
FAMILIES = ["qwen3", "qwen2", "llama", "qwen3_moe"]


@pytest.fixture
def other_dir(tmp_path):
    def build(family="qwen3", **config):
        return build_tiny_model(tmp_path / "other", family, initializer_range=0.2, max_length=128, seed=7, **config)

    return build


def tensors_of(load_model, directory):
    return dict(checkpoint_tensors(load_model(directory)))


async def sync(generator, version, tensors):
    loader = generator.loader
    await loader.begin(version, loader.expected_manifest())
    assert generator.state == "loading"
    items = list(tensors.items())
    await loader.load_tensors(items[1::2])
    await loader.load_tensors(iter(items[0::2]))
    assert await loader.finish() == version
    assert (generator.state, generator.policy_version) == ("serving", version)


def greedy(model, count=12):
    ids = torch.from_numpy(PROMPT)[None]
    return model.generate(input_ids=ids, do_sample=False, max_new_tokens=count, pad_token_id=0, eos_token_id=None)[
        0, len(PROMPT) :
    ].tolist()


@pytest.mark.parametrize("channel", ["tensors", "checkpoint"])
@pytest.mark.parametrize(("family", "tie"), [*((f, True) for f in FAMILIES), ("llama", False)])
async def test_after_a_sync_output_is_transformers_with_the_new_weights(
    family, tie, channel, model_dir, other_dir, make_generator, load_model, ask
):
    old, new = model_dir(family, tie=tie), other_dir(family, tie=tie)
    generator = make_generator(old)
    assert (await generator.generate(ask("a", PROMPT, temperature=0.0))).token_ids.tolist() == greedy(load_model(old))
    if channel == "tensors":
        await sync(generator, 5, tensors_of(load_model, new))
    else:
        await generator.loader.begin(5, generator.loader.expected_manifest())
        await generator.loader.load_checkpoint(new)
        assert await generator.loader.finish() == 5
    after = await generator.generate(ask("b", PROMPT, temperature=0.0))
    assert after.token_ids.tolist() == greedy(load_model(new))
    assert after.token_ids.tolist() != greedy(load_model(old))
    assert after.version_spans == (VersionSpan(0, 12, 5),)


@pytest.mark.parametrize("family", FAMILIES)
async def test_reloading_the_same_weights_changes_nothing(family, model_dir, make_generator, load_model, ask):
    generator = make_generator(model_dir(family))
    before = await generator.generate(ask("a", PROMPT, seed=2))
    await sync(generator, 1, tensors_of(load_model, model_dir(family)))
    after = await generator.generate(ask("b", PROMPT, seed=2))
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.logprobs.tobytes() == before.logprobs.tobytes()


@pytest.mark.parametrize("kv_after_sync", ["recomputed", "kept"])
async def test_a_sequence_kept_over_a_sync(
    kv_after_sync, model_dir, other_dir, make_generator, load_model, ask, plain_logits
):
    old, new = load_model(model_dir()), load_model(other_dir())
    generator = make_generator(kv_after_sync=kv_after_sync)
    others = [ask(str(i), np.arange(30, 31 + i), max_tokens=30) for i in range(4)]
    tasks = [asyncio.create_task(generator.generate(r)) for r in (*others, ask("a", PROMPT, max_tokens=30, seed=4))]
    step, count = generator._scheduler.step, 0

    def stop_at_seven():
        nonlocal count
        report = step()
        count += 1
        generator._paused = count == 7
        return report

    generator._scheduler.step = stop_at_seven
    while count < 7:
        await asyncio.sleep(0.001)
    await generator.pause()
    await sync(generator, 3, dict(checkpoint_tensors(new)))
    await generator.resume()
    *rest, completion = await asyncio.gather(*tasks)
    assert completion.version_spans == (VersionSpan(0, 7, 0), VersionSpan(7, 30, 3))
    assert all(c.version_spans == completion.version_spans for c in rest)

    ids = torch.from_numpy(completion.token_ids)[:, None]

    def logprobs_of(model):
        return plain_logits(model, PROMPT, completion.token_ids).log_softmax(-1).gather(-1, ids)[:, 0].numpy()

    np.testing.assert_allclose(completion.raw_logprobs[:7], logprobs_of(old)[:7], atol=1e-4)
    under_new = np.allclose(completion.raw_logprobs[7:], logprobs_of(new)[7:], atol=1e-4)
    assert under_new == (kv_after_sync == "recomputed")


async def test_a_wrong_manifest_changes_nothing(make_generator, ask):
    generator = make_generator()
    before = await generator.generate(ask("a", PROMPT))
    expected = generator.loader.expected_manifest()
    names = sorted(expected.tensors)
    tensors = dict(expected.tensors)
    tensors[names[0]] = replace(tensors[names[0]], dtype="bfloat16")
    tensors[names[1]] = replace(tensors[names[1]], shape=(1, 2))
    del tensors[names[2]]
    tensors["model.extra"] = TensorSpec("model.extra", (1,), "float32")
    with pytest.raises(WeightSyncError) as caught:
        await generator.loader.begin(1, WeightManifest(tensors, expected.aliases))
    message = str(caught.value)
    assert "4 tensors differ" in message
    assert f"{names[0]}: dtype bfloat16 offered, float32 expected" in message
    assert f"{names[1]}: shape [1, 2] offered" in message
    assert f"{names[2]}: expected by the generator, not offered" in message
    assert "model.extra: offered by the trainer, unknown" in message
    with pytest.raises(WeightSyncError, match=r"\d+ tensors differ(.|\n)*and \d+ more"):
        await generator.loader.begin(1, WeightManifest({}))
    assert generator.state == "serving"
    after = await generator.generate(ask("b", PROMPT))
    assert after.token_ids.tolist() == before.token_ids.tolist()


async def test_another_dtype_is_cast_where_asked_for(model_dir, other_dir, make_generator, load_model, ask):
    new = load_model(other_dir()).to(torch.bfloat16)
    generator = make_generator(sync_dtype="convert")
    expected = generator.loader.expected_manifest()
    offered = WeightManifest(
        {name: replace(spec, dtype="bfloat16") for name, spec in expected.tensors.items()}, expected.aliases
    )
    await generator.loader.begin(1, offered)
    await generator.loader.load_tensors(checkpoint_tensors(new))
    await generator.loader.finish()
    found = await generator.generate(ask("a", PROMPT, temperature=0.0))
    assert found.token_ids.tolist() == greedy(new.float())


async def test_a_missing_tensor_kills_the_replica(make_generator, load_model, model_dir, ask):
    generator = make_generator()
    tensors = tensors_of(load_model, model_dir())
    left_out = sorted(tensors)[3]
    del tensors[left_out]
    loader = generator.loader
    await loader.begin(1, loader.expected_manifest())
    await loader.load_tensors(tensors.items())
    with pytest.raises(WeightSyncError, match=rf"1 of \d+ tensors of policy version 1 did not arrive: {left_out}"):
        await loader.finish()
    assert generator.state == "dead"
    assert left_out in generator.health()
    with pytest.raises(WeightSyncError, match="is dead; restart it"):
        await loader.begin(2, loader.expected_manifest())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, t: ("model.typo", t), "model.typo: arrived, but the manifest did not announce it"),
        (lambda name, t: (name, t[:-1]), r"shape \[.*\] arrived, \[.*\] announced"),
        (lambda name, t: (name, t.double()), "dtype float64 arrived, float32 announced"),
    ],
)
async def test_a_tensor_that_was_not_announced_kills_the_replica(
    change, message, make_generator, load_model, model_dir, ask
):
    generator = make_generator()
    name, tensor = next(iter(tensors_of(load_model, model_dir()).items()))
    await generator.loader.begin(1, generator.loader.expected_manifest())
    with pytest.raises(WeightSyncError, match=message):
        await generator.loader.load_tensors([change(name, tensor)])
    assert generator.state == "dead"


@pytest.mark.parametrize("alias_first", [True, False])
async def test_a_tied_head_may_come_under_both_names(alias_first, other_dir, make_generator, load_model, ask):
    new = load_model(other_dir())
    tensors = dict(checkpoint_tensors(new))
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    generator = make_generator()
    expected = generator.loader.expected_manifest()
    assert expected.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    spec = TensorSpec("lm_head.weight", tuple(head["lm_head.weight"].shape), "float32")
    await generator.loader.begin(1, WeightManifest(dict(expected.tensors) | {spec.name: spec}))
    await generator.loader.load_tensors((head | tensors if alias_first else tensors | head).items())
    assert await generator.loader.finish() == 1
    assert (await generator.generate(ask("a", PROMPT, temperature=0.0))).token_ids.tolist() == greedy(new)


async def test_a_repeated_tensor_is_refused(make_generator, load_model, model_dir):
    generator = make_generator()
    item = next(iter(tensors_of(load_model, model_dir()).items()))
    await generator.loader.begin(1, generator.loader.expected_manifest())
    with pytest.raises(WeightSyncError, match="arrived twice"):
        await generator.loader.load_tensors([item, item])


async def test_a_failed_sync_fails_kept_requests(make_generator, load_model, model_dir, ask):
    generator = make_generator()
    await generator.pause()
    task = asyncio.create_task(generator.generate(ask("kept", PROMPT)))
    await asyncio.sleep(0)
    await generator.loader.begin(1, generator.loader.expected_manifest())

    def broken():
        yield next(iter(tensors_of(load_model, model_dir()).items()))
        raise ConnectionError("peer gone")

    with pytest.raises(WeightSyncError, match=r"failed after 1 of \d+ tensors: ConnectionError: peer gone"):
        await generator.loader.load_tensors(broken())
    with pytest.raises(BackendError, match="request 'kept' failed: loading tensors failed"):
        await task


def cut(name, tensor, parts=2):
    """A tensor in boxes: rows, and of the first of them halves of the columns."""
    if tensor.ndim == 0:
        return [WeightShard(name, (), (), 0, tensor)]
    edges = [tensor.shape[0] * i // parts for i in range(parts + 1)]
    rest = [(0, size) for size in tensor.shape[1:]]
    boxes = [((a, b), *rest) for a, b in pairwise(edges)]
    if len(rest) == 1:
        half = tensor.shape[1] // 2
        boxes[:1] = [(boxes[0][0], (0, half)), (boxes[0][0], (half, tensor.shape[1]))]
    return [WeightShard(name, tuple(tensor.shape), box, 0, tensor[slices(box)]) for box in boxes]


@pytest.mark.parametrize("family", FAMILIES)
async def test_boxes_are_placed_where_they_belong(family, model_dir, other_dir, make_generator, load_model, ask):
    new = other_dir(family)
    generator = make_generator(model_dir(family))
    loader = generator.loader
    await loader.begin(5, loader.expected_manifest())
    boxes = [box for name, tensor in tensors_of(load_model, new).items() for box in cut(name, tensor, 3)]
    await loader.load_boxes(boxes[1::2])  # in any order
    await loader.load_boxes(boxes[::2])
    assert await loader.finish() == 5
    served = dict(checkpoint_tensors(loader._model))
    for name, tensor in tensors_of(load_model, new).items():
        assert torch.equal(served[name], tensor), name
    answer = await generator.generate(ask("b", PROMPT, temperature=0.0))
    assert answer.token_ids.tolist() == greedy(load_model(new))


async def test_an_element_that_did_not_come_is_named(make_generator, load_model, model_dir):
    generator = make_generator()
    loader = generator.loader
    await loader.begin(1, loader.expected_manifest())
    tensors = tensors_of(load_model, model_dir())
    first, *others = tensors
    boxes = cut(first, tensors[first])
    await loader.load_boxes([boxes[0], *(box for name in others for box in cut(name, tensors[name]))])
    missing = r"1 of \d+ tensors of policy version 1 did not arrive: model.embed_tokens.weight \(elements \[\d+:\d+, "
    with pytest.raises(WeightSyncError, match=missing):
        await loader.finish()
    assert generator.state == "dead"


@pytest.mark.parametrize("fault", ["twice", "beyond", "extent", "unknown", "shape"])
async def test_a_box_that_does_not_fit_kills_the_replica(make_generator, load_model, model_dir, fault):
    generator = make_generator()
    loader = generator.loader
    await loader.begin(1, loader.expected_manifest())
    name, tensor = next(iter(tensors_of(load_model, model_dir()).items()))
    box = cut(name, tensor)[0]
    shards, words = {
        "twice": ([box, box], "came twice"),
        "beyond": ([replace(box, box=((tensor.shape[0], tensor.shape[0] + 1), box.box[1]))], "arrived for the box"),
        "extent": ([replace(box, tensor=box.tensor[:1])], "arrived for the box"),
        "unknown": ([replace(box, name="model.extra")], "the manifest did not announce it"),
        "shape": ([replace(box, global_shape=(1, 2))], r"shape \[1, 2\] arrived"),
    }[fault]
    with pytest.raises(WeightSyncError, match=words):
        await loader.load_boxes(shards)
    assert generator.state == "dead"


async def test_order_of_calls(make_generator, tmp_path, ask):
    generator = make_generator()
    loader = generator.loader
    with pytest.raises(WeightSyncError, match="finish without begin"):
        await loader.finish()
    with pytest.raises(WeightSyncError, match="load_boxes without begin"):
        await loader.load_boxes([])
    generator.offload({"weights"})
    with pytest.raises(WeightSyncError, match="onload 'weights' before version 1"):
        await loader.begin(1, loader.expected_manifest())
    generator.onload({"weights"})
    await loader.begin(1, loader.expected_manifest())
    with pytest.raises(WeightSyncError, match="is loading version 1; finish or fail it before version 2"):
        await loader.begin(2, loader.expected_manifest())
    with pytest.raises(BackendError, match="is loading and cannot take request 'x'"):
        await generator.generate(ask("x", PROMPT))
    with pytest.raises(WeightSyncError, match=r"cannot be read: .*has no weights"):
        await loader.load_checkpoint(tmp_path)
    assert generator.state == "dead"


async def test_fail_is_final(make_generator, ask):
    generator = make_generator()
    await generator.loader.begin(1, generator.loader.expected_manifest())
    await generator.loader.fail("the trainer went away")
    with pytest.raises(BackendError, match="is dead and cannot take request 'x'; restart it: the trainer went away"):
        await generator.generate(ask("x", PROMPT))
