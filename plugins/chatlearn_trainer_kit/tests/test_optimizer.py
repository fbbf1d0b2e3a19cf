import pytest
import torch

from chatlearn_trainer_kit.optimizer import allocate_state, build_optimizer, optimizer_tensors, set_learning_rate
from chatlearn_trainer_kit.options import OptimizerOptions

INPUTS = torch.tensor([[1.0, -2.0], [0.5, 3.0]])


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(INPUTS).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 3)


def test_sgd_is_the_definition_and_spares_biases_from_decay() -> None:
    model = make_model()
    weight, bias = (parameter.detach().clone() for parameter in (model.weight, model.bias))
    outputs = INPUTS @ weight.T + bias
    step(model, build_optimizer(model, OptimizerOptions(optimizer="sgd", learning_rate=0.1, weight_decay=0.5)))
    torch.testing.assert_close(model.weight, weight - 0.1 * (2 * outputs.T @ INPUTS + 0.5 * weight))
    torch.testing.assert_close(model.bias, bias - 0.1 * 2 * outputs.sum(0))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"exp_avg", "exp_avg_sq", "step"}),
        ({"optimizer": "sgd", "momentum": 0.9}, {"momentum_buffer"}),
        ({"optimizer": "sgd"}, set()),
    ],
    ids=["adamw", "momentum", "sgd"],
)
def test_state_loaded_into_a_new_optimizer_continues_identically(options, names) -> None:
    whole, part = make_model(), make_model()
    chosen = OptimizerOptions(learning_rate=0.01, **options)
    optimizers = [build_optimizer(model, chosen) for model in (whole, part)]
    for model, optimizer in zip((whole, part), optimizers, strict=True):
        step(model, optimizer)
    saved = optimizer_tensors(optimizers[1], part)
    assert {name for entry in saved.values() for name in entry} == names
    resumed = build_optimizer(part, chosen)
    allocate_state(resumed, part.parameters())
    live = optimizer_tensors(resumed, part)
    assert live.keys() == ({"weight", "bias"} if names else set())
    for name, entry in live.items():
        for key, tensor in entry.items():
            tensor.copy_(saved[name][key])
    step(whole, optimizers[0])
    step(part, resumed)
    assert torch.equal(whole.weight, part.weight)
    assert torch.equal(whole.bias, part.bias)


def test_frozen_parameters_are_left_out() -> None:
    model = make_model()
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerOptions())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]
