"""An update computes the logprobs that were computed before it: no dropout unless it is asked for."""

from dataclasses import dataclass, field

import pytest
import torch

from chatlearn_core.protocols import LossOutput
from chatlearn_core.types import OutputRequest
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_losses import clipped_policy_loss

pytestmark = pytest.mark.engine
LOGPROBS = OutputRequest(frozenset({"logprobs"}))


@dataclass
class ClippedLoss:
    """The clipped policy loss, which keeps the ratios it saw."""

    needs: OutputRequest = LOGPROBS
    unit: str = "sequence"
    ratios: list[torch.Tensor] = field(default_factory=list)
    clipped: float = 0.0

    def prepare(self, batch):
        return batch

    def __call__(self, outputs, batch):
        ratio = (outputs["logprobs"] - batch.token_data["trainer_logprobs"]).exp()
        clip = clipped_policy_loss(ratio, batch.token_data["advantages"], clip_low=0.2, clip_high=0.2)
        self.ratios.append(ratio.detach()[batch.loss_mask])
        self.clipped += float(clip.clipped[batch.loss_mask].sum())
        return LossOutput((clip.per_token * batch.token_data["loss_weight"]).sum())


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """With its default configuration: dropout 0.1 on embeddings, attention and residuals."""
    return str(build_tiny_model(tmp_path_factory.mktemp("models") / "gpt2", "gpt2"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        {"attention": "eager"},
        {"max_tokens_per_micro_batch": 40},
        {"lora": {"rank": 2}},
    ],
    ids=str,
)
def test_the_first_on_policy_update_has_ratio_one(make_trainer, make_batch, gpt2, options) -> None:
    trainer, batch, loss = make_trainer(path=gpt2, **options), make_batch(), ClippedLoss()
    batch.token_data["trainer_logprobs"] = trainer.compute(batch, LOGPROBS)["logprobs"]
    metrics = trainer.update(batch, loss)
    ratios = torch.cat(loss.ratios)
    assert torch.equal(ratios, torch.ones(int(batch.loss_mask.sum())))
    assert loss.clipped == 0
    assert metrics["grad_norm"].total > 0
    trainer.update(batch, loss)
    assert not torch.equal(loss.ratios[-1], torch.ones_like(loss.ratios[-1])), "the weights have moved"


@pytest.mark.parametrize("options", [{"dropout": True}, {"lora": {"rank": 2, "dropout": 0.5}}], ids=str)
def test_requested_noise_is_applied_and_logged(make_trainer, make_batch, gpt2, options, caplog) -> None:
    trainer, batch, loss = make_trainer(path=gpt2, learning_rate=0.1, **options), make_batch(), ClippedLoss()
    for _ in range(2):  # a new adapter is zero whatever goes into it
        batch.token_data["trainer_logprobs"] = trainer.compute(batch, LOGPROBS)["logprobs"]
        trainer.update(batch, loss)
    assert (loss.ratios[-1] - 1).abs().max() > 0.01
    assert "roles.trainer trains with noise (" in caplog.text
    assert (
        "lora.dropout 0.5" if "lora" in options else "attn_pdrop 0.1, embd_pdrop 0.1, resid_pdrop 0.1"
    ) in caplog.text


def test_omitted_noise_is_logged(make_trainer, gpt2, caplog) -> None:
    make_trainer(path=gpt2, trainable=False)
    make_trainer()
    assert not caplog.text, "nothing trains, or nothing was asked for"
    make_trainer(path=gpt2)
    assert f"without the noise that {gpt2} requests in its config.json (attn_pdrop 0.1, embd_pdrop 0.1" in caplog.text
    assert "options.dropout to true" in caplog.text
