"""Where tensors lie in a block."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tapestream.errors import InputError
from tapestream.storage import Layout
from tapestream.storage.transfer import aligned_empty

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex128]
TENSORS = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES)), max_size=8)


@given(TENSORS)
def test_views_are_aligned_separate_and_as_asked(tensors):
    layout = Layout.of(tensors)
    memory = aligned_empty(layout.nbytes).zero_()
    views = layout.views(memory)
    assert layout.nbytes % 4096 == 0
    assert [(list(view.shape), view.dtype) for view in views] == [(list(shape), dtype) for shape, dtype in tensors]
    for number, view in enumerate(views, 1):
        assert view.is_contiguous()
        assert layout.offsets[number - 1] % 512 == 0
        if view.numel():
            assert view.data_ptr() == memory.data_ptr() + layout.offsets[number - 1]
        view.view(-1).view(torch.uint8).add_(number) if view.numel() else None
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in tensors]
    counts = torch.bincount(memory.long(), minlength=len(tensors) + 1)
    assert counts[1:].tolist() == sizes  # every byte of a view was touched once, by that view alone


def test_little_space_is_lost():
    layout = Layout.of([((1000,), torch.float32)] * 100)
    assert layout.nbytes == -(-100 * 4096 // 4096) * 4096
    assert Layout.of([]).nbytes == 0


@pytest.mark.parametrize("memory", [torch.empty(4095, dtype=torch.uint8), torch.empty(4096), torch.empty(2, 4096)])
def test_memory_that_does_not_fit_is_refused(memory):
    with pytest.raises(InputError, match="at least 4096 elements"):
        Layout.of([((3,), torch.float32)]).views(memory)
