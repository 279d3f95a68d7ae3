"""What single operations take: floating-point operations, and bytes that they read and write."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_Formula = Callable[..., int]
_aten = torch.ops.aten


def floating_point(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating-point operations of products, convolutions and attention; of everything else none, as bytes bound it."""
    formula = _FORMULAS.get(func.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)


def touched_nbytes(func: Any, given: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> int | None:
    """Bytes of tensors that an operation reads and writes; None for one that only looks at tensors anew, or allocates.

    What is written in place counts once. Of what is expanded, only what is stored counts. Of a table in which it looks
    up rows, an operation reads as much as it makes."""
    before = {t.untyped_storage()._cdata for t in given}
    made = [t for t in out if t.untyped_storage()._cdata not in before]
    if not (made or func._schema.is_mutable) or func.overloadpacket in _ALLOCATIONS:
        return None
    rows = func.overloadpacket in _LOOKUPS
    return sum(map(_nbytes, made)) * (2 if rows else 1) + sum(map(_nbytes, given[1:] if rows else given))


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """Those that an operation is given or returns: nothing else than lists of them holds any."""
    found: list[torch.Tensor] = []
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += tensors_of(arg)
    return found


def _nbytes(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


_LOOKUPS = {_aten.embedding, _aten.index_select, _aten.index, _aten.gather, _aten.take}
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


def _grouped_products(left: Any, right: Any, *args: Any, **_: Any) -> int:
    return 2 * int(left.numel()) * int(right.shape[-1])


def _attention(query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, **_: Any) -> int:
    shapes = (query.shape, _for_every_head(key, query), _for_every_head(value, query))
    flops: int = sdpa_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return flops // 2 if is_causal else flops


def _for_every_head(shared: Any, query: Any) -> tuple[int, ...]:
    """The shape of keys or values as the kernel reads them: once for each head of the queries, few as they may be
    (grouped-query attention, which PyTorch 2.11 refuses to count)."""
    batch, _, *others = shared.shape
    return (batch, query.shape[1], *others)


def _attention_backward(
    cotangent: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, dropout_p: float, is_causal: bool, **_: Any
) -> int:
    shapes = (cotangent.shape, query.shape, _for_every_head(key, query), _for_every_head(value, query))
    flops: int = sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return flops // 2 if is_causal else flops


# PyTorch's own, and those of the CPU's fused attention, of which half is done where it is causal.
_FORMULAS: dict[Any, _Formula] = {
    **flop_registry,
    _aten._grouped_mm: _grouped_products,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
