"""Operations on fake tensors whose kind is known make what `FakeTensorMode` makes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tapestream.frontends.outlines.fake import fake_tensors
from tapestream.frontends.outlines.outlining import outline
from tapestream.frontends.outlines.quick import QuickKernels


class Scan(nn.Module):
    """A loop over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for token in range(x.shape[1]):
            state = torch.tanh(self.inner(x[:, token]) + 0.5 * state)
            found.append(state.unsqueeze(1))
        return torch.cat(found, dim=1)


class _Quick(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels = QuickKernels()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.kernels(func, args, kwargs or {})


def test_a_new_tensor_has_what_the_constructor_gives_it() -> None:
    with FakeTensorMode() as mode:
        x = torch.empty(6, 6)
        with _Quick():
            made = [x.select(1, 0) for _ in range(4)]
        bare = torch.empty(6, device="meta")
    slow = FakeTensor(mode, bare, torch.device("cpu"))
    for quick in made:
        assert vars(quick) == vars(slow)
        assert (quick.device, quick.fake_device, quick.requires_grad) == (x.device, slow.fake_device, False)
        assert torch._C._dispatch_keys(quick) == torch._C._dispatch_keys(slow)
    vars(made[-1])["constant"] = 1.0
    assert made[-2].constant is None


def _calls(x: torch.Tensor, y: torch.Tensor) -> Iterator[torch.Tensor]:
    base = x[1:]
    for k in range(4):
        yield x.select(1, k)
        yield base.select(0, k)
        yield base.transpose(0, 1)
        yield x[:, k].unsqueeze(1).expand(-1, 3)
        yield x[k : k + 2].reshape(-1)
        yield x @ y + float(k)
        yield x.mul(k) + x.mul(k + 0.5)
        yield x.t().sum(dim=k % 2, keepdim=True)
        yield x.as_strided((2, 2), (1, 1), k)
        yield base.as_strided((2, 2), (1, 1), k)
        yield base.view(base.shape)
        yield x.detach()
        yield torch.stack([x[k], x[0]])
        yield x.to(torch.float64) if k % 2 else x.to(torch.float32)
        yield torch.ops.aten.select_backward(x[0], [6, 6], 0, k)
        yield nn.functional.dropout(x, 0.5)
        yield from x.split(k + 1)


def _described(tensors: list[torch.Tensor], given: list[torch.Tensor]) -> list[object]:
    storages = [t.untyped_storage()._cdata for t in given]
    return [
        (t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes(), t.device, t.requires_grad,
         storages.index(key) if (key := t.untyped_storage()._cdata) in storages else None)
        for t in tensors
    ]  # fmt: skip


def test_results_are_those_of_fake_tensor_mode() -> None:
    with FakeTensorMode():
        given = [torch.empty(6, 6, requires_grad=True), torch.empty(6, 6).t()]
        plain = _described(list(_calls(*given)), given)
        with _Quick():
            assert _described(list(_calls(*given)), given) == plain


@contextmanager
def _dispatches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Operations that `FakeTensorMode` looks at."""
    seen: list[Any] = []
    dispatch: Callable[..., Any] = FakeTensorMode.dispatch

    def noted(self: FakeTensorMode, func: Any, *args: Any) -> Any:
        seen.append(func)
        return dispatch(self, func, *args)

    with monkeypatch.context() as patched:
        patched.setattr(FakeTensorMode, "dispatch", noted)
        yield seen


def test_longer_loops_are_no_more_work_for_fake_tensor_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for tokens in (16, 64):
        with _dispatches(monkeypatch) as seen:
            outline(nn.Sequential(*(Scan() for _ in range(3))), (torch.empty(2, tokens, 8, device="meta"),))
        counts.append(len(seen))
    assert counts[1] <= counts[0] < 64 * 3


def test_what_looks_anew_costs_nothing() -> None:
    with fake_tensors("cpu") as meter:
        x = torch.empty(64, 64)
        with meter.counted() as work, meter.measured() as section:
            for k in range(8):
                assert x.select(0, k).unsqueeze(0).shape == (1, 64)
    assert not work
    assert section.peak_nbytes == 0
