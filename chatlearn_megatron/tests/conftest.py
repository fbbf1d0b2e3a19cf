"""Tiny models, a batch, and ranks that do jobs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_hf.tiny import build_tiny_model, build_tiny_tokenizer
from chatlearn_hosting.fork_server import ForkServer

LENGTHS = [17, 40, 1, 7, 38, 22, 9]
RANKS_DEADLINE_S = 240.0
PADDING_ID = 0
TEMPERATURE = 0.7
LATENT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_hidden_layers": 4, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 2, "moe_intermediate_size": 24,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-4, "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Sizes of a tiny model with latent attention, whose first layer has no experts."""
LATENT_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT | {
        "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 16, "rope_theta": 10000.0,
        },
    },
    "moonlight": LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
}  # fmt: skip
WINDOWED: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 4, "max_position_embeddings": 512, "sliding_window": 8, "tie_word_embeddings": False,
}  # fmt: skip
"""Sizes of a tiny Mistral whose window is shorter than most sequences."""
OTHER_FAMILIES = {name: ("deepseek_v3", sizes) for name, sizes in LATENT_FAMILIES.items()} | {
    "mistral": ("mistral", WINDOWED)
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def batch() -> TrainBatch:
    """Seven sequences of random tokens; ``loss_weight`` is a token mean over the batch."""
    generator = torch.Generator().manual_seed(0)
    total, bounds, count = sum(LENGTHS), cumulative_lengths(LENGTHS), len(LENGTHS)
    mask = torch.rand(total, generator=generator) < 0.7
    mask[bounds[:-1].long()] = False
    tokens = torch.randint(0, 300, (total,), generator=generator)
    tokens[::20] = PADDING_ID  # a token like others where a model pads with its end of text
    return TrainBatch(
        sample_ids=tuple(f"s{i}" for i in range(count)),
        token_ids=tokens,
        cu_seqlens=bounds,
        loss_mask=mask,
        unit_index=torch.arange(count),
        group_index=torch.arange(count),
        token_data={
            "loss_weight": mask / mask.sum(),
            "advantages": torch.randn(total, generator=generator),
            "chosen": torch.randint(0, 300, (total, 2), generator=generator),
        },
        sequence_data={"target": torch.randn(count, generator=generator)},
    )


def _model(directory: Path, family: str) -> str:
    """Write a tiny model of four layers; the vocabulary of ``qwen2`` is odd, so that tensor parallel ranks pad it."""
    if family == "gpt2":
        from transformers import AutoConfig, AutoModelForCausalLM

        tokenizer = build_tiny_tokenizer()
        shape = AutoConfig.for_model(
            "gpt2", vocab_size=len(tokenizer), n_embd=64, n_layer=4, n_head=4, n_positions=512, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
            for name, parameter in model.named_parameters():
                torch.nn.init.normal_(parameter, 1.0 if "ln_" in name and name.endswith("weight") else 0.0, 0.1)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return str(directory)
    if family in OTHER_FAMILIES:
        from transformers import AutoConfig, AutoModelForCausalLM

        tokenizer = build_tiny_tokenizer()
        kind, sizes = OTHER_FAMILIES[family]
        shape = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
            for name, tensor in model.state_dict().items():
                torch.nn.init.normal_(tensor, 1.0 if "norm" in name else 0.0, 0.1)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return str(directory)
    tokenizer = build_tiny_tokenizer(extra_tokens=["<|odd|>"]) if family == "qwen2" else None
    return str(build_tiny_model(directory, family, layers=4, tie=family != "llama", tokenizer=tokenizer))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``model_of(family)``: directory of a tiny model with four layers."""
    made: dict[str, str] = {}

    def of(family: str) -> str:
        if family not in made:
            made[family] = _model(tmp_path_factory.mktemp("models") / family, family)
        return made[family]

    return of


def _loss(head: str, outputs: dict[str, torch.Tensor], batch: TrainBatch) -> torch.Tensor:
    """The loss that the ranks compute in parts."""
    weight, advantage = batch.token_data["loss_weight"], batch.token_data["advantages"]
    if head == "lm":
        return -(weight * (advantage * outputs["logprobs"] + 0.1 * outputs["entropy"])).sum()
    if head == "value":
        return (weight * (outputs["values"] - advantage) ** 2).sum()
    return ((outputs["scores"] - batch.sequence_data["target"]) ** 2).sum()


def _plain_loss(model: Any, head: str, batch: TrainBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    bounds = batch.cu_seqlens.tolist()
    outputs: dict[str, list[torch.Tensor]] = {}
    for start, stop in itertools.pairwise(bounds):
        tokens = batch.token_ids[start:stop]
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        if head == "reward":
            outputs.setdefault("scores", []).append(logits.reshape(-1)[-1:])
            continue
        masked = batch.loss_mask[start:stop]
        first = logits.new_zeros(1)
        if head == "value":
            values = torch.cat([first, logits[:-1, 0]])
            outputs.setdefault("values", []).append(torch.where(masked, values, 0.0))
            continue
        rows = (logits[:-1] / TEMPERATURE).log_softmax(-1)
        chosen = torch.cat([first, rows.gather(-1, tokens[1:, None]).squeeze(-1)])
        entropy = torch.cat([first, -(rows.exp() * rows).sum(-1)])
        outputs.setdefault("logprobs", []).append(torch.where(masked, chosen, 0.0))
        outputs.setdefault("entropy", []).append(torch.where(masked, entropy, 0.0))
    joined = {name: torch.cat(parts) for name, parts in outputs.items()}
    return joined, _loss(head, joined, batch)


@pytest.fixture(scope="session")
def plain_loss() -> Callable[..., tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """``plain_loss(model, head, batch)``: outputs [T] or [S] of a transformers model on each sequence alone, and the
    loss that the ranks compute in parts.
    """
    return _plain_loss


def _run_jobs(
    server: ForkServer, jobs: Mapping[str, Mapping[str, Any]], batch: TrainBatch, directory: Path
) -> dict[str, list[dict[str, Any]]]:
    """Start as many rank processes as the largest job needs and let them do all jobs; answers of every rank, by job.

    See ``megatron_rank_process.do_job`` for the keys of a job.
    """
    defaults: dict[str, Any] = {"head": "lm", "world": 1, "updates": 1, "more": 0, "options": {}, "engine": {}}
    defaults |= dict.fromkeys(("load", "save", "export", "take"))
    complete = {name: defaults | dict(job) for name, job in jobs.items()}
    for name, job in complete.items():
        job["rendezvous"] = f"file://{directory / name}.rendezvous" if job["world"] > 1 else None
    directory.mkdir(parents=True)
    torch.save({"jobs": complete, "batch": batch}, directory / "work.pt")
    size = max(job["world"] for job in complete.values())
    ranks = [server.start("megatron_rank_process:main", str(rank), str(directory)) for rank in range(size)]
    try:
        deadline = time.monotonic() + RANKS_DEADLINE_S
        # A rank that died leaves the others waiting for it, so the first to fail ends it.
        while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
            assert time.monotonic() < deadline, "the ranks did not finish"
            time.sleep(0.1)
        assert not any(rank.returncode for rank in ranks), "a rank failed; its error is above"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return {
        name: [torch.load(directory / f"{name}.rank{rank}.pt", weights_only=False) for rank in range(job["world"])]
        for name, job in complete.items()
    }


@pytest.fixture(scope="session")
def run_jobs() -> Iterator[Callable[..., dict[str, list[dict[str, Any]]]]]:
    """``run_jobs(jobs, batch, directory)``, see ``_run_jobs``."""
    with ForkServer("megatron_rank_process", path=[str(Path(__file__).parent)]) as server:
        yield partial(_run_jobs, server)
