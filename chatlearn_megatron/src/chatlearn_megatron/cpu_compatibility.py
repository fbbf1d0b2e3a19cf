"""Makes Megatron-Core run on a CPU over gloo. The only module that changes Megatron-Core, for one version of it.

Megatron-Core asks CUDA for its current device, its random state and the type of its tensors. In a process without CUDA
the modules of ``megatron.core`` get a stand-in for ``torch`` whose factories allocate on the CPU and whose ``cuda``
answers for the CPU; torch itself is unchanged. On GPUs with TransformerEngine nothing is changed; where it is missing,
``complete_without_engine`` repairs what Megatron-Core gets wrong without it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch import Tensor

from chatlearn_core.exceptions import BackendError

PATCHED_VERSION = "0.16.1"
"""The version of megatron-core that this module was written and tested for."""

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "as_tensor", "randint", "linspace")
_MODULES = (
    "megatron.core.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.multi_latent_attention",
)
"""Modules to import before the stand-in is put in place; they import the others."""
_installed = _completed = False


def complete_without_engine() -> None:
    """Where TransformerEngine is not installed, define two names that Megatron-Core reads all the same, and let
    distributed optimizers load the step counts of torch's AdamW. A repeated call changes nothing.

    Raises:
        BackendError: another version of megatron-core is installed.
    """
    global _completed
    if _completed or HAVE_TE:
        return
    _require_version("without TransformerEngine")
    _define_missing_names()
    _replace_step_counts()
    _completed = True


def install() -> None:
    """Put the stand-in in place. A repeated call only covers modules that were imported since.

    Raises:
        BackendError: another version of megatron-core is installed.
    """
    global _installed
    _require_version("on a CPU")
    for name in _MODULES:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = _STAND_IN  # type: ignore[attr-defined]  # the module's own global
    if not _installed:
        _replace_random_state()
        _replace_dispatcher_copies()
        _replace_uneven_collectives()
        _replace_type_checks()
        if HAVE_TE:
            _replace_optimizers()
            _replace_step_counts()
        _installed = True


def _require_version(where: str) -> None:
    found = version("megatron-core")
    if found != PATCHED_VERSION:
        raise BackendError(
            f"megatron-core {found} is installed, but {where} the trainer 'megatron' runs with version"
            f" {PATCHED_VERSION} only, which it was adapted to; run: pip install megatron-core=={PATCHED_VERSION}"
        )


class _Nothing:
    """Stands for a stream and an event, which a CPU does not have."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nothing)

    def __hash__(self) -> int:
        return 0

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Nothing()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def _nothing(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = _nothing


class _Cuda(types.ModuleType):
    """Stands for ``torch.cuda``."""

    Stream = Event = _Nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def current_stream(self, *_: Any) -> _Nothing:
        return _Nothing()

    default_stream = current_stream

    def stream(self, _: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def memory_allocated(self, *_: Any) -> int:
        return 0

    max_memory_allocated = memory_allocated

    def is_current_stream_capturing(self) -> bool:
        return False

    def _nothing(self, *_: Any) -> None:
        pass

    set_device = synchronize = empty_cache = set_stream = _nothing


class _Torch(types.ModuleType):
    """Stands for ``torch``."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda("torch.cuda")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **named: Any) -> Tensor:
        device = named.get("device")
        if (isinstance(device, int) and not isinstance(device, bool)) or (
            isinstance(device, str | torch.device) and torch.device(device).type == "cuda"
        ):
            named["device"] = torch.device("cpu")
        named.pop("pin_memory", None)
        return factory(*args, **named)

    return create


_STAND_IN = _Torch()


def _replace_random_state() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _replace_dispatcher_copies() -> None:
    """The dispatcher turns its split sizes into numpy arrays only if they are CUDA tensors."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.cpu().numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


@contextlib.contextmanager
def without_cuda_copies(device: torch.device) -> Iterator[None]:
    """Inside, on a CPU, ``tensor.cuda()`` returns the tensor. Tied heads on several stages and checkpoints copy so."""
    if device.type != "cpu":
        yield
        return
    own = Tensor.cuda
    Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        Tensor.cuda = own  # type: ignore[method-assign]


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """Inside, ``tensor.type()`` says ``torch.cuda.FloatTensor``, as the optimizers require."""
    own = Tensor.type

    def named(tensor: Tensor, *args: Any, **other: Any) -> Any:
        answer = own(tensor, *args, **other)
        is_plain = isinstance(answer, str) and not answer.startswith("torch.cuda.")
        return answer.replace("torch.", "torch.cuda.", 1) if is_plain else answer

    Tensor.type = named  # type: ignore[method-assign,assignment]  # put back below
    try:
        yield
    finally:
        Tensor.type = own  # type: ignore[method-assign]


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **named)

    return call


def _replace_uneven_collectives() -> None:
    """Expert tensor parallel ranks exchange different numbers of tokens, which gloo does not: pad, or sum all."""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_uneven(values: Tensor, group: Any, sizes: list[int] | None = None, *rest: Any, **named: Any) -> Tensor:
        if sizes is None or group.size() == 1:
            answer: Tensor = gather(values, group, sizes, *rest, **named)
            return answer
        padded = values.new_zeros(max(sizes), *values.shape[1:])
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter_uneven(values: Tensor, group: Any, sizes: list[int] | None = None, *rest: Any, **named: Any) -> Tensor:
        if sizes is None or group.size() == 1:
            answer: Tensor = scatter(values, group, sizes, *rest, **named)
            return answer
        total = values.clone()
        torch.distributed.all_reduce(total, group=group)
        own: Tensor = torch.split(total, list(sizes))[group.rank()]
        return own.contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_uneven, scatter_uneven


def _define_missing_names() -> None:
    """Routers multiply with one, and latent attention asks whether its layers are of the other's kind."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = type("TELinear", (), {})


def _replace_optimizers() -> None:
    """TransformerEngine's optimizers, which Megatron-Core takes where it is installed, need CUDA."""
    from megatron.core import optimizer as optimizers
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    optimizers.Adam, optimizers.SGD, optimizers.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, torch.optim.SGD, True
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = False
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    for module in (clip_grads, optimizer):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale


def _replace_type_checks() -> None:
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    distributed = distrib_optimizer.DistributedOptimizer
    mixed = optimizer.Float16OptimizerWithFloat16Params
    mixed.__init__ = _with_cuda_type_names(mixed.__init__)
    distributed.__init__ = _with_cuda_type_names(distributed.__init__)
    distributed._build_model_and_main_param_groups = classmethod(
        _with_cuda_type_names(distributed.__dict__["_build_model_and_main_param_groups"].__func__)
    )
    clip = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    for module in (clip_grads, optimizer):
        module.clip_grad_by_total_norm_fp32 = clip


def _replace_step_counts() -> None:
    """torch's AdamW counts steps for each parameter in a tensor; Megatron-Core's own optimizers do not."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    put, load = DistributedOptimizer._set_main_param_and_optimizer_states, DistributedOptimizer.load_state_dict

    def put_with_step(self: Any, parameter: Any, tensors: dict[str, Tensor]) -> Any:
        group, order = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        # The step travels in the parameter groups, not among the tensors of a checkpoint.
        return put(self, parameter, {"step": state["step"], **tensors} if "step" in state else tensors)

    def load_own_steps(self: Any, content: Any) -> Any:
        answer = load(self, content)
        # All parameters would share one tensor, to which each of them would add 1 at every step.
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()
        return answer

    DistributedOptimizer._set_main_param_and_optimizer_states = put_with_step
    DistributedOptimizer.load_state_dict = load_own_steps
