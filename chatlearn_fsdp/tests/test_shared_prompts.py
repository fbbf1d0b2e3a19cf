"""A trainer computes the same with shared prompts and without them."""

import pytest
import torch

from chatlearn_core.types import OutputRequest
from chatlearn_hf.tiny import build_tiny_model


@pytest.fixture(scope="module")
def family_path(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")

    def build(family: str) -> str:
        directory = root / family
        return str(directory if directory.exists() else build_tiny_model(directory, family))

    return build


@pytest.mark.engine
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens_per_micro_batch": 60},
        {"max_tokens_per_micro_batch": 1},
        {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 100, "logits_chunk_tokens": 16},
        {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}},
    ],
    ids=str,
)
def test_loss_outputs_and_gradients_do_not_depend_on_sharing(
    make_trainer, make_grouped_batch, policy_loss, gradients_of, family_path, family, options
) -> None:
    batch = make_grouped_batch()
    answers = []
    for share in (True, False):
        trainer = make_trainer(path=family_path(family), grad_clip=None, share_prompts=share, **options)
        outputs = trainer.compute(batch, OutputRequest(frozenset({"logprobs", "entropy", "hidden_states"}), 0.7))
        answers.append((outputs, trainer.update(batch, policy_loss), gradients_of(trainer)))
    (ours, metrics, gradients), (plain, expected, apart) = answers
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], atol=2e-5, rtol=0)
    for name in ("loss", "grad_norm"):
        assert metrics[name].value == pytest.approx(expected[name].value, rel=1e-5), name
    for name, gradient in apart.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    assert metrics["perf/tokens"].total == expected["perf/tokens"].total == batch.num_tokens
    assert expected["perf/computed_tokens"].total == batch.num_tokens
    alone = options.get("max_tokens_per_micro_batch") == 1
    assert (metrics["perf/computed_tokens"].total < batch.num_tokens) is not alone


@pytest.mark.engine
@pytest.mark.parametrize(("head", "name"), [("value", "values"), ("reward", "scores")])
def test_other_heads_too(make_trainer, make_grouped_batch, head, name) -> None:
    batch, request = make_grouped_batch(), OutputRequest(frozenset({name}))
    on, off = (make_trainer(head=head, share_prompts=share).compute(batch, request)[name] for share in (True, False))
    torch.testing.assert_close(on, off, atol=1e-5, rtol=0)


@pytest.mark.engine
def test_other_attention_computes_prompts_apart(make_trainer, make_grouped_batch, policy_loss) -> None:
    batch = make_grouped_batch()
    metrics = make_trainer(attention="sdpa").update(batch, policy_loss)
    assert metrics["perf/computed_tokens"].total == batch.num_tokens
