"""What chooses between kernels, and so decides about last bits: how to ask for it, and how to set it."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.errors import GradientError

_C: Any = torch._C


def _set_deterministic(on: bool) -> None:
    _C._set_deterministic_algorithms(on, warn_only=_C._get_deterministic_algorithms_warn_only())


def _set_warn_only(warn_only: bool) -> None:
    _C._set_deterministic_algorithms(_C._get_deterministic_algorithms(), warn_only=warn_only)


def refused(wanted: str) -> None:
    """In place of what puts it back: raise GradientError."""
    # PyTorch has two ways to set it, and some questions raise where both are used.
    raise GradientError(
        f"an operation ran with the precision {wanted!r} of float32 products (torch.set_float32_matmul_precision, "
        "allow_tf32) and has to run again with another; do not change it until after backward"
    )


Choice: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]


def _choices(names: Sequence[str]) -> list[Choice]:
    """Of the switches ``names``, of kernels for attention and of others, those that this PyTorch has."""
    found: list[Choice] = []
    for name in names:
        if hasattr(_C, f"_set_sdp_use_{name}"):
            found.append((getattr(_C, f"_get_{name}_sdp_enabled"), getattr(_C, f"_set_sdp_use_{name}")))
        elif hasattr(_C, f"_set_{name}"):
            found.append((getattr(_C, f"_get_{name}"), partial(_put, getattr(_C, f"_set_{name}"))))
    return found


def _put(put: Callable[..., Any], answer: Any) -> None:
    put(*answer) if isinstance(answer, tuple) else put(answer)


def _precisions(backend: str) -> list[Choice]:
    """Of products, convolutions and recurrent layers in float32."""
    ask, put = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter
    others = [(partial(ask, backend, kind), partial(put, backend, kind)) for kind in ("conv", "rnn")]
    return [(partial(ask, backend, "matmul"), refused), *others]


_DENORMAL = float.fromhex("0x1p-1074")  # not computed: that would be flushed, too


_flushes = partial(operator.eq, 0.0, _DENORMAL)
"""Whether the processor takes denormal numbers for 0, as `torch.set_flush_denormal` has it."""


_ATTENTION_ON_CPU = _choices(("flash", "math", "sdp_priority_order", "math_sdp_allow_fp16_bf16_reduction"))
_ATTENTION_ON_GPU = _choices(("mem_efficient", "cudnn", "overrideable", "fa3"))
_PRODUCTS_ON_CPU = [
    *_precisions("mkldnn"),
    *_choices(("mkldnn_deterministic", "nnpack_enabled", "cpu_allow_fp16_reduced_precision_reduction")),
]
_PRODUCTS_ON_GPU = [
    *_precisions("cuda"),
    *_choices(
        ("cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction",
         "cublas_allow_fp16_accumulation", "blas_preferred_backend", "linalg_preferred_backend",
         "cudnn_depthwise_kernel")
    ),
]  # fmt: skip
ON_CPU: list[Choice] = [
    (_C._get_deterministic_algorithms, _set_deterministic),
    (_C._get_deterministic_algorithms_warn_only, _set_warn_only),
    *_ATTENTION_ON_CPU,
    *_choices(("mkldnn_enabled",)),
    *_PRODUCTS_ON_CPU,
    (torch.get_num_threads, torch.set_num_threads),
    (_flushes, torch.set_flush_denormal),
]
KERNELS: list[Choice] = [
    *ON_CPU,
    *_ATTENTION_ON_GPU,
    *_choices(("cudnn_enabled", "cudnn_deterministic")),
    *_PRODUCTS_ON_GPU,
]
"""What chooses kernels: how to ask, and how to set it; first what concerns the CPU."""
FOR_ATTENTION = [get for get, _ in (*_ATTENTION_ON_CPU, *_ATTENTION_ON_GPU)]
"""How to ask for what `scaled_dot_product_attention` alone goes by."""
FOR_PRODUCTS = [get for get, _ in (*_PRODUCTS_ON_CPU, *_PRODUCTS_ON_GPU)]
"""How to ask for what matrix products, convolutions and recurrent layers alone go by."""
GUARDED = (_C._get_deterministic_algorithms, _C._get_deterministic_algorithms_warn_only, torch.get_num_threads)
"""How to ask for what torch's own guard of its global state knows, too."""


def fixed(answer: Any) -> Any:
    """What one of `KERNELS` answers, as a value that does not change."""
    return tuple(answer) if isinstance(answer, list) else answer


def are_chosen(kernels: Sequence[Any]) -> bool:
    """Whether what chooses kernels is as ``kernels``, in the order of `KERNELS`, says."""
    return all(fixed(get()) == wanted for (get, _), wanted in zip(KERNELS, kernels, strict=False))


def algorithms_not_tried(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Inside, ``torch.backends.cudnn.benchmark`` is off on an accelerator: it tries algorithms anew in each thread, so
    that a recompute could take another one than the first run, and its trials take memory that no plan knows of."""
    tries = is_accelerator(device) and torch.backends.cudnn.benchmark
    return _without_trials() if tries else contextlib.nullcontext()


@contextlib.contextmanager
def _without_trials() -> Iterator[None]:
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = True


def choose(kernels: Sequence[Any]) -> None:
    """Have what chooses kernels be as ``kernels``, in the order of `KERNELS`, says."""
    for (get, put), wanted in zip(KERNELS, kernels, strict=False):
        wanted = list(wanted) if isinstance(get(), list) else wanted
        if get() != wanted:
            put(wanted)
