"""LoRA adapters: a sync brings an adapter, the base stays; against peft in plain transformers."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import WeightManifest
from chatlearn_hosting import SharedBlock
from chatlearn_testing.model_directory import manifest_of, read_checkpoint

pytestmark = pytest.mark.engine

PROMPT = [5, 9, 3]


@pytest.fixture(scope="module")
def replica(model_dir, make_replica):
    replica = make_replica(model_dir(), lora={"max_rank": 8})
    yield replica
    replica.close()


@pytest.fixture
def make_adapter(model_dir, load_model, tmp_path):
    """``make_adapter(seed)``: (peft model, its configuration, its tensors), far enough from zero to be seen."""

    def make(seed):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
        )
        model = get_peft_model(load_model(model_dir()), config)
        model.save_pretrained(tmp_path / str(seed))
        saved = json.loads((tmp_path / str(seed) / "adapter_config.json").read_text())
        return model, saved, load_file(tmp_path / str(seed) / "adapter_model.safetensors")

    return make


def greedy(model):
    ids = torch.tensor([PROMPT])
    out = model.generate(input_ids=ids, do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=None)
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("channel", ["tensors", "memory_handles"])
def test_each_sync_serves_the_new_adapter(channel, replica, make_adapter, load_model, model_dir):
    base = greedy(load_model(model_dir()))
    seen = []
    for seed in (1, 2):
        model, config, tensors = make_adapter(seed)
        version = replica.generator.policy_version + 1

        async def load(tensors=tensors, config=config, version=version):
            loader = replica.loader
            manifest = WeightManifest(manifest_of(tensors).tensors, adapter=config)
            await loader.begin(version, manifest)
            if channel == "tensors":
                await loader.load_tensors(tensors.items())
            else:
                with SharedBlock(1 << 20) as block:
                    for handle in block.fill(tensors.items()):
                        await loader.load_handles(handle)
            assert await loader.finish() == version

        replica.run(load())
        answer = replica.generate(PROMPT)
        assert answer.token_ids.tolist() == greedy(model)
        assert [span.version for span in answer.version_spans] == [version]
        seen.append(answer.token_ids.tolist())
    assert len({tuple(tokens) for tokens in (base, *seen)}) == 3, "the adapters change too little to be seen"


def test_a_whole_model_is_refused_with_the_remedy(replica, model_dir):
    tensors = read_checkpoint(model_dir())
    with pytest.raises(WeightSyncError, match=r"set weight_sync\.payload to adapter, or remove options\.lora"):
        replica.sync(tensors)
    assert replica.generator.state == "serving"


def test_an_adapter_of_too_large_a_rank_leaves_the_replica_dead(model_dir, make_replica, make_adapter):
    replica = make_replica(model_dir(), lora={"max_rank": 8})
    try:
        _, config, tensors = make_adapter(3)
        config = config | {"r": 64}

        async def load():
            await replica.loader.begin(1, WeightManifest(manifest_of(tensors).tensors, adapter=config))
            await replica.loader.load_tensors(tensors.items())
            await replica.loader.finish()

        with pytest.raises(WeightSyncError, match="rank 64"):
            replica.run(load())
        assert replica.generator.state == "dead"
    finally:
        replica.close()
