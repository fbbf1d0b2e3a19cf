import itertools

import pytest
import torch

from chatlearn_core.exceptions import BackendError, ModelError
from chatlearn_core.types import OutputRequest
from chatlearn_hf.heads import load_model
from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_hf.packed_forward import PackedModel, packed_logits, packed_outputs
from chatlearn_hf.varlen_attention import PackedLayout

FAMILIES = ["qwen3", "qwen2", "llama", "qwen3_moe"]


def sequences(batch):
    return [batch.token_ids[a:b] for a, b in itertools.pairwise(batch.cu_seqlens.tolist())]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_each_sequence_alone(tiny, make_batch, family) -> None:
    path, batch = str(tiny(family)), make_batch()
    packed, plain = load_causal_lm(path), load_causal_lm(path, attention="eager")
    with torch.no_grad():
        expected = torch.cat([plain(ids[None]).logits[0] for ids in sequences(batch)])
        assert (packed_logits(packed, batch) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("chunk", [None, 7])
def test_logprobs_entropy_and_their_gradients(tiny, make_batch, chunk) -> None:
    path, batch, temperature = str(tiny()), make_batch(), 0.6
    plain = load_causal_lm(path, attention="eager")
    packed = PackedModel(load_causal_lm(path), "lm", logits_chunk_tokens=chunk)
    outputs = packed_outputs(packed, batch, OutputRequest(frozenset({"logprobs", "entropy"}), temperature))
    logprobs, entropies = [], []
    for ids in sequences(batch):
        logs = torch.log_softmax(plain(ids[None]).logits[0] / temperature, -1)
        logprobs.append(torch.cat([logs.new_zeros(1), logs[:-1].gather(-1, ids[1:, None])[:, 0]]))
        entropies.append(torch.cat([logs.new_zeros(1), -(logs.exp() * logs).sum(-1)[:-1]]))
    expected = {"logprobs": torch.cat(logprobs) * batch.loss_mask, "entropy": torch.cat(entropies) * batch.loss_mask}
    torch.manual_seed(0)
    upstream = {name: torch.randn(batch.num_tokens) for name in expected}
    for name in expected:
        torch.testing.assert_close(outputs[name], expected[name], atol=1e-5, rtol=0)
    sum((upstream[name] * outputs[name]).sum() for name in expected).backward()
    sum((upstream[name] * expected[name]).sum() for name in expected).backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in packed.model.named_parameters():
        assert (parameter.grad - theirs[name].grad).norm() <= 1e-4 * theirs[name].grad.norm(), name


@pytest.mark.parametrize("chunk", [None, 7])
def test_the_most_likely_tokens_and_given_ones_with_gradients(tiny, make_batch, chunk) -> None:
    """Against transformers' own forward of each sequence alone."""
    path, batch, temperature, k = str(tiny()), make_batch(), 0.6, 5
    plain = load_causal_lm(path, attention="eager")
    packed = PackedModel(load_causal_lm(path), "lm", logits_chunk_tokens=chunk)
    torch.manual_seed(1)
    batch.token_data["chosen"] = torch.randint(0, packed.vocab_size, (batch.num_tokens, 3))
    names = frozenset({"topk_ids", "topk_logprobs", "logprobs_at", "logprobs"})
    request = OutputRequest(names, temperature, {"k": k, "ids": "chosen"})
    outputs = packed_outputs(packed, batch, request)
    logs = []
    for ids in sequences(batch):
        full = torch.log_softmax(plain(ids[None]).logits[0] / temperature, -1)
        logs.append(torch.cat([full.new_zeros(1, full.shape[1]), full[:-1]]))
    full, mask = torch.cat(logs), batch.loss_mask[:, None]
    top = full.topk(k, dim=-1)
    expected = {
        "topk_logprobs": top.values * mask,
        "logprobs_at": full.gather(-1, batch.token_data["chosen"]) * mask,
    }
    assert torch.equal(outputs["topk_ids"], top.indices * mask)
    assert outputs["topk_ids"].dtype == torch.int64
    torch.manual_seed(0)
    upstream = {name: torch.randn_like(values) for name, values in expected.items()}
    for name, values in expected.items():
        torch.testing.assert_close(outputs[name], values, atol=1e-4, rtol=0)
    sum((upstream[name] * outputs[name]).sum() for name in expected).backward()
    sum((upstream[name] * expected[name]).sum() for name in expected).backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in packed.model.named_parameters():
        assert (parameter.grad - theirs[name].grad).norm() <= 1e-4 * theirs[name].grad.norm(), name


def test_an_empty_row_has_empty_tables_of_tokens(tiny) -> None:
    packed = PackedModel(load_causal_lm(str(tiny())))
    none = torch.zeros(0, dtype=torch.int64)
    names = {"topk_ids", "topk_logprobs", "logprobs_at"}
    outputs = packed(none, PackedLayout([]), names, top_k=4, selected_ids=none.reshape(0, 3))
    assert {name: tuple(values.shape) for name, values in outputs.items()} == {
        "topk_ids": (0, 4),
        "topk_logprobs": (0, 4),
        "logprobs_at": (0, 3),
    }
    (outputs["topk_logprobs"].sum() + outputs["logprobs_at"].sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in packed.parameters())


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("topk_ids", {}, "k is 0, but must be"),
        ("topk_logprobs", {"k": 10**6}, "k is 1000000, but must be"),
        ("logprobs_at", {}, "reads the token data 'None', which the batch lacks; it has chosen"),
        ("logprobs_at", {"ids": "teacher_ids"}, "reads the token data 'teacher_ids', which the batch lacks"),
        (
            "logprobs_at",
            {"ids": "chosen"},
            "was requested for token 10000000; the vocabulary has .* another vocabulary",
        ),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(tiny, make_batch, name, arguments, says) -> None:
    batch = make_batch()
    batch.token_data["chosen"] = torch.full((batch.num_tokens, 1), 10**7)
    with pytest.raises(BackendError, match=says):
        packed_outputs(
            PackedModel(load_causal_lm(str(tiny()))), batch, OutputRequest(frozenset({name}), arguments=arguments)
        )


def test_the_head_sees_only_states_before_learned_tokens(tiny, make_batch) -> None:
    batch = make_batch()
    packed = PackedModel(load_causal_lm(str(tiny())))
    seen = []
    packed.model.lm_head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[-2]))
    packed_outputs(packed, batch, OutputRequest(frozenset({"logprobs"})))
    assert sum(seen) == int(batch.loss_mask.sum()) < batch.num_tokens - batch.num_sequences


def test_without_a_mask_every_token_but_the_first_is_scored(tiny, make_batch) -> None:
    batch = make_batch()
    packed = PackedModel(load_causal_lm(str(tiny())))
    with torch.no_grad():
        logprobs = packed(batch.token_ids, PackedLayout(batch.lengths), {"logprobs"})["logprobs"]
        masked = packed_outputs(packed, batch, OutputRequest(frozenset({"logprobs"})))["logprobs"]
    assert ((logprobs == 0) == (batch.position_ids == 0)).all()
    torch.testing.assert_close(masked, logprobs * batch.loss_mask, atol=1e-6, rtol=0)


def test_an_empty_row_gives_empty_outputs_on_every_parameters_graph(tiny) -> None:
    packed = PackedModel(load_causal_lm(str(tiny())))
    outputs = packed(torch.zeros(0, dtype=torch.int64), PackedLayout([]), {"logprobs"})
    assert outputs["logprobs"].shape == (0,)
    outputs["logprobs"].sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in packed.parameters())


def test_values_line_up_with_the_state_before_the_token(tiny, make_batch) -> None:
    batch = make_batch()
    model = load_model(str(tiny()), "value", seed=3)
    plain = load_causal_lm(str(tiny()), attention="eager").base_model
    with torch.no_grad():
        values = packed_outputs(PackedModel(model, "value"), batch, OutputRequest(frozenset({"values"})))["values"]
        expected = []
        for ids in sequences(batch):
            states = plain(ids[None]).last_hidden_state[0] @ model.score.weight[0] + model.score.bias
            expected.append(torch.cat([states.new_zeros(1), states[:-1]]))
    torch.testing.assert_close(values, torch.cat(expected) * batch.loss_mask, atol=1e-5, rtol=0)


def two_that_begin_alike(make_batch):
    """The second sequence begins with the first twelve tokens of the first; 28 rows for 40 tokens."""
    batch = make_batch((17, 16, 7))
    batch.token_ids[17:29] = batch.token_ids[:12]
    batch.loss_mask[:17], batch.loss_mask[17:33] = torch.arange(17) >= 12, torch.arange(16) >= 12
    rows = torch.cat([torch.arange(17), torch.arange(12), torch.arange(17, 28)])
    return batch, PackedLayout(batch.lengths, rows=rows)


@pytest.mark.parametrize(
    ("head", "names"),
    [("lm", {"logprobs", "entropy", "hidden_states"}), ("value", {"values"}), ("reward", {"scores"})],
)
def test_shared_rows_change_no_output_and_no_gradient(tiny, make_batch, head, names) -> None:
    batch, layout = two_that_begin_alike(make_batch)
    answers = []
    for chosen in (layout, PackedLayout(batch.lengths)):
        packed = PackedModel(load_model(str(tiny()), head, seed=3), head)
        seen: list[int] = []
        packed.model.base_model.layers[0].register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(args[0].shape[1])
        )
        outputs = packed(batch.token_ids, chosen, names, 0.7, batch.loss_mask)
        generator = torch.Generator().manual_seed(0)
        sum((outputs[n] * torch.randn(outputs[n].shape, generator=generator)).sum() for n in sorted(names)).backward()
        answers.append((outputs, {name: p.grad for name, p in packed.named_parameters()}, seen))
    (ours, mine, shared), (plain, theirs, apart) = answers
    assert (shared, apart) == ([28], [40])
    for name in names:
        torch.testing.assert_close(ours[name], plain[name], atol=1e-5, rtol=0)
    for name, gradient in theirs.items():
        if gradient is not None:
            assert (mine[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_shared_rows_are_refused_by_other_attention(tiny, make_batch) -> None:
    batch, layout = two_that_begin_alike(make_batch)
    packed = PackedModel(load_causal_lm(str(tiny()), attention="sdpa"))
    with pytest.raises(ModelError, match="shared rows needs attention 'chatlearn_varlen', but the model has 'sdpa'"):
        packed(batch.token_ids, layout, {"logprobs"})


def test_an_output_of_another_head_is_refused(tiny, make_batch) -> None:
    packed = PackedModel(load_causal_lm(str(tiny())))
    with pytest.raises(BackendError, match="head 'lm' cannot compute values"):
        packed_outputs(packed, make_batch(), OutputRequest(frozenset({"values"})))


def truncation_of(logits, temperature: float, top_k: int, top_p: float):
    """[V] logprobs of one row after top-k, then top-p of the rest, one id at a time."""
    scaled = logits.double() / temperature
    order = scaled.argsort(descending=True)[:top_k]
    probabilities, kept = scaled[order].softmax(-1), []
    for index, probability in zip(order.tolist(), probabilities.tolist(), strict=True):
        kept.append((index, probability))
        if sum(p for _, p in kept) >= top_p:
            break
    ids = torch.tensor([index for index, _ in kept])
    return torch.full_like(scaled, -torch.inf).index_copy(0, ids, scaled[ids]).log_softmax(-1), ids


@pytest.mark.parametrize("chunk", [None, 7])
def test_logprobs_over_the_kept_ids_and_their_packing(tiny, make_batch, chunk) -> None:
    """Against transformers' own forward of each sequence alone, masked explicitly; and alone as packed together."""
    path, batch, temperature = str(tiny()), make_batch(), 0.6
    plain = load_causal_lm(path, attention="eager")
    packed = PackedModel(load_causal_lm(path), "lm", logits_chunk_tokens=chunk)
    expected, rows = [], []
    for ids in sequences(batch):
        with torch.no_grad():
            logits = plain(ids[None]).logits[0]
        expected.append(0.0)
        rows.append(torch.zeros(6, dtype=torch.int32))
        for row, token in zip(logits[:-1], ids[1:], strict=True):
            _, kept = truncation_of(row, temperature, 5, 0.8)
            kept = kept if token in kept else torch.cat([kept, token[None]])  # as if it had been sampled
            masked = torch.full_like(row, -torch.inf).index_copy(0, kept, row[kept] / temperature)
            expected.append(float(masked.log_softmax(-1)[token]))
            rows.append(torch.cat([kept, kept.new_full((6 - len(kept),), -1)]).int())
    kept_ids = batch.token_data["kept_ids"] = torch.stack(rows)
    request = OutputRequest(frozenset({"truncated_logprobs", "logprobs"}), temperature, {"kept": "kept_ids"})
    outputs = packed_outputs(packed, batch, request)
    found = outputs["truncated_logprobs"]
    torch.testing.assert_close(found, torch.tensor(expected) * batch.loss_mask, atol=1e-5, rtol=0)
    assert (found >= outputs["logprobs"] - 1e-6).all(), "what was cut away makes the rest likelier"
    bounds = itertools.pairwise(batch.cu_seqlens.tolist())
    alone = [
        packed(
            batch.token_ids[a:b],
            PackedLayout([b - a]),
            {"truncated_logprobs"},
            temperature,
            batch.loss_mask[a:b],
            kept_ids=kept_ids[a:b],
        )["truncated_logprobs"]
        for a, b in bounds
    ]
    torch.testing.assert_close(torch.cat(alone), found, atol=1e-5, rtol=0)


def test_a_token_outside_its_kept_ids_is_refused(tiny, make_batch) -> None:
    packed, batch = PackedModel(load_causal_lm(str(tiny()))), make_batch()
    request = OutputRequest(frozenset({"truncated_logprobs"}), 1.0, {"kept": "kept_ids"})
    with pytest.raises(BackendError, match="token data 'kept_ids', which the batch lacks"):
        packed_outputs(packed, batch, request)
    batch.token_data["kept_ids"] = batch.token_ids[:, None].clone()
    packed_outputs(packed, batch, request)
    at = int(batch.loss_mask.nonzero()[3])
    batch.token_data["kept_ids"][at] += 1
    with pytest.raises(BackendError, match=rf"position {at} .* not among the ids it was sampled from"):
        packed_outputs(packed, batch, request)
