"""`linear_cross_entropy` against the same chunks in plain PyTorch, bit for bit, and against all rows at once."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tapestream as ts
from tapestream.errors import GradientError, InputError
from tapestream.frontends import loss as loss_module

WIDTH, VOCABULARY, SHAPE = 24, 130, (3, 7)


@dataclass(frozen=True)
class Case:
    """What is computed, and from what."""

    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    autocast: bool = False
    cached: bool = True
    bias: bool = False
    transposed: bool = False
    chunks: int = 4
    frozen: tuple[str, ...] = ()
    ignored: float = 0.2
    scale: float = 1.0
    options: tuple[tuple[str, Any], ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """Fresh leaves, the same at each call."""
        torch.manual_seed(0)
        labels = torch.randint(VOCABULARY, SHAPE)
        labels[torch.rand(SHAPE) < self.ignored] = dict(self.options).get("ignore_index", -100)
        leaves = {
            "hidden": torch.randn(*SHAPE, WIDTH).to(self.dtype),
            "weight": torch.randn(VOCABULARY, WIDTH).to(self.weight_dtype or self.dtype),
        }
        if self.transposed:
            leaves["weight"] = leaves["weight"].t().contiguous().t()
        if self.bias:
            leaves["bias"] = torch.randn(VOCABULARY).to(self.weight_dtype or self.dtype)
        return {name: t.requires_grad_(name not in self.frozen) for name, t in leaves.items()} | {"labels": labels}

    def surroundings(self) -> contextlib.AbstractContextManager[Any]:
        if not self.autocast:
            return contextlib.nullcontext()
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cached)


def plain(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, chunks: int = 1,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, softcap: float | None = None,
    shift: bool = False,
) -> Tensor:  # fmt: skip
    """The chunked loss as one would write it."""
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat, flat_labels = hidden.flatten(0, -2), labels.flatten()
    rows = -(-len(flat) // chunks)
    losses = []
    for h, y in zip(flat.split(rows), flat_labels.split(rows), strict=True):
        logits = F.linear(h, weight, bias)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        losses.append(
            F.cross_entropy(
                logits if logits.dtype == torch.float64 else logits.float(),
                y,
                ignore_index=ignore_index,
                reduction="none" if reduction == "none" else "sum",
                label_smoothing=label_smoothing,
            )
        )
    if reduction == "none":
        return torch.cat(losses).view(labels.shape)
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total / (flat_labels != ignore_index).sum() if reduction == "mean" else total


def differentiated(function: Callable[..., Tensor], case: Case) -> dict[str, Tensor | None]:
    """The loss and every gradient."""
    tensors = case.tensors()
    with case.surroundings():
        loss = function(**tensors, chunks=case.chunks, **dict(case.options))
    if loss.requires_grad:
        torch.manual_seed(1)
        loss.backward(case.scale * (torch.randn_like(loss) if loss.dim() else torch.ones_like(loss)))
    return {"loss": loss.detach()} | {name: tensors[name].grad for name in tensors}


def assert_same_bits(expected: dict[str, Tensor | None], found: dict[str, Tensor | None]) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (tensor is None) == (other is None), name
        if tensor is not None and other is not None:
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), name


CASES = {
    "one chunk": Case(chunks=1),
    "uneven": Case(chunks=4, bias=True),
    "a chunk per row": Case(chunks=21, bias=True),
    "more chunks than rows": Case(chunks=50),
    "cotangent": Case(scale=1 / 3, bias=True),
    "sum": Case(scale=1 / 3, options=(("reduction", "sum"),)),
    "none": Case(bias=True, options=(("reduction", "none"),)),
    "none shifted": Case(options=(("reduction", "none"), ("shift", True))),
    "shifted": Case(options=(("shift", True), ("ignore_index", 3))),
    "all ignored": Case(ignored=1.0),
    "all ignored, sum": Case(ignored=1.0, options=(("reduction", "sum"),)),
    "none ignored": Case(ignored=0.0),
    "smoothed": Case(bias=True, scale=1 / 3, options=(("label_smoothing", 0.1),)),
    "smoothed none": Case(options=(("label_smoothing", 0.3), ("reduction", "none"))),
    "capped": Case(bias=True, options=(("softcap", 5.0),)),
    "frozen weight": Case(bias=True, frozen=("weight",)),
    "frozen hidden": Case(bias=True, frozen=("hidden",)),
    "frozen bias": Case(bias=True, frozen=("bias",)),
    "bias alone": Case(bias=True, frozen=("hidden", "weight")),
    "all frozen": Case(frozen=("hidden", "weight")),
    "transposed weight": Case(transposed=True),
    "float64": Case(dtype=torch.float64, bias=True),
}
LOW = {
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16),
    "autocast": Case(autocast=True),
    "autocast, weight of 16 bit": Case(autocast=True, weight_dtype=torch.bfloat16),
    "autocast, hidden of 16 bit": Case(autocast=True, dtype=torch.bfloat16, weight_dtype=torch.float32),
    "autocast, float64": Case(autocast=True, dtype=torch.float64),
}
VARIANTS = {
    "": {},
    "a chunk per row": {"chunks": 21, "bias": True},
    "capped, smoothed, scaled": {"scale": 1 / 3, "options": (("softcap", 5.0), ("label_smoothing", 0.1))},
    "frozen weight": {"frozen": ("weight",), "options": (("reduction", "none"),)},
    "all ignored": {"ignored": 1.0, "bias": True, "options": (("shift", True),)},
}
CASES |= {f"{low} {name}": replace(case, **given) for low, case in LOW.items() for name, given in VARIANTS.items()}


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_chunks_in_plain_pytorch(
    name: str, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sliced:  # as large arguments are
        monkeypatch.setattr(loss_module, "_LEAST_SLICE_NBYTES", 1)
        monkeypatch.setattr(loss_module, "_GRAIN", 32)
    case = CASES[name]
    assert_same_bits(differentiated(plain, case), differentiated(ts.linear_cross_entropy, case))


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(400, 96, 3001), (150, 200, 9001), (150, 200, 8193)])
def test_bits_at_a_size_where_kernels_cut_their_sums_and_we_our_slices(
    rows: int, width: int, vocabulary: int, low: bool
) -> None:
    def run(function: Callable[..., Tensor]) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        hidden, weight = torch.randn(2, rows, width), torch.randn(vocabulary, width) / 10
        leaves = [t.bfloat16().requires_grad_() if low else t.requires_grad_() for t in (hidden, weight)]
        loss = function(*leaves, torch.randint(vocabulary, (2, rows)), chunks=2, shift=True)
        loss.backward()
        return {"loss": loss.detach(), "hidden": leaves[0].grad, "weight": leaves[1].grad}

    assert_same_bits(run(plain), run(ts.linear_cross_entropy))
    slices = loss_module._slices(vocabulary, (2 if low else 4) * vocabulary * width, loss_module._GRAIN)
    assert len(slices) == (1 if vocabulary == 3001 else 3 if low else 4)


@pytest.mark.parametrize(
    ("count", "nbytes", "grain"),
    [(5, 2**30, 1), (70_000, 2**23, 1024), (8_193, 2**23, 1024), (3, 10, 1), (0, 0, 7)],
)
def test_slices_cover_every_row_once(count: int, nbytes: int, grain: int) -> None:
    slices = loss_module._slices(count, nbytes, grain)
    assert [row for part in slices for row in range(count)[part]] == list(range(count))
    assert all(part.start % grain == 0 for part in slices)
    assert len(slices) == 1 or all(part.stop - part.start >= grain for part in slices)
    assert len(slices) <= min(16, max(1, nbytes // 2**20))


def test_autocast_casts_the_weight_once_even_without_its_cache() -> None:
    case = Case(autocast=True)
    uncached = differentiated(ts.linear_cross_entropy, replace(case, cached=False))
    assert_same_bits(differentiated(plain, case), uncached)
    assert not torch.equal(differentiated(plain, replace(case, cached=False))["weight"], uncached["weight"])


@pytest.mark.parametrize("autocast", [False, True])
def test_a_tied_weight_collects_both_gradients(autocast: bool) -> None:
    def run(function: Callable[..., Tensor]) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
        tokens = torch.randint(VOCABULARY, SHAPE)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = function(torch.tanh(F.embedding(tokens, weight)), weight, tokens, chunks=3, shift=True)
        loss.backward()
        return {"loss": loss.detach(), "weight": weight.grad}

    assert_same_bits(run(plain), run(ts.linear_cross_entropy))


@pytest.mark.parametrize("chunks", ["auto", 5])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_equals_the_loss_of_all_rows_at_once(chunks: Any, reduction: Any, smoothing: float) -> None:
    tensors = Case(dtype=torch.float64, bias=True).tensors()
    leaves = [t for t in tensors.values() if t.requires_grad]
    logits = F.linear(tensors["hidden"], tensors["weight"], tensors["bias"])
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    whole = F.cross_entropy(logits.flatten(0, -2), tensors["labels"].flatten(), **options)
    ours = ts.linear_cross_entropy(**tensors, chunks=chunks, **options)
    torch.testing.assert_close(ours.flatten(), whole.flatten())
    for a, b in zip(*(torch.autograd.grad(t.sum(), leaves) for t in (ours, whole)), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_are_the_derivative() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 4, 3).double().requires_grad_(), torch.randn(6, 3).double().requires_grad_()
    labels = torch.randint(6, (2, 4))

    def function(h: Tensor, w: Tensor) -> Tensor:
        return ts.linear_cross_entropy(h, w, labels, chunks=3, softcap=2.0, shift=True)

    assert torch.autograd.gradcheck(function, (hidden, weight))


@pytest.mark.parametrize("chunks", ["auto", 8, 32])
@pytest.mark.parametrize("frozen", [False, True])
def test_peak_is_a_chunk_and_the_gradients(chunks: Any, frozen: bool) -> None:
    rows, width, vocabulary = 256, 64, 50_000
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / 10).requires_grad_(not frozen)
    labels = torch.randint(vocabulary, (rows,))
    in_chunk = width // 4 if chunks == "auto" else rows // chunks
    chunk, gradient = 4 * in_chunk * vocabulary, 0 if frozen else weight.nbytes
    with ts.track_memory() as forward:
        loss = ts.linear_cross_entropy(hidden, weight, labels, chunks=chunks)
    with ts.track_memory() as backward:
        loss.backward()
    # Slices are of 1 to 2 MiB at least; a cross entropy keeps up to three times its logits.
    slices = max(3 * min(chunk, chunk // 16 + 2**21), gradient // 16 + 2**21)
    slack = hidden.nbytes + 2**17
    assert 2 * chunk <= forward.peak_nbytes <= 2 * chunk + slack
    assert chunk + gradient <= backward.peak_nbytes <= chunk + gradient + slices + slack


class Head(nn.Module):
    """The last stage of a chain: (hidden, labels) to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        return ts.linear_cross_entropy(*(state[0], self.weight, state[1]), chunks=3, shift=True)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return F.gelu(self.linear(state[0])), state[1]


@pytest.mark.parametrize(("planner", "budget"), [("store_all", None), ("revolve", "44KiB"), ("rotor", "44KiB")])
@pytest.mark.parametrize("autocast", [False, True])
def test_last_stage_of_a_chain(planner: str, budget: str | None, autocast: bool) -> None:
    def run(wrap: bool) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        stages = nn.Sequential(*(Body() for _ in range(12)), Head())
        chain = ts.Chain(list(stages), planner=planner, budget=budget)
        hidden, labels = torch.randn(*SHAPE, WIDTH, requires_grad=True), torch.randint(VOCABULARY, SHAPE)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = (chain if wrap else stages)((hidden, labels))
        (loss / 3).backward()
        if wrap:
            assert chain.plan is not None
            assert (chain.plan.simulation.forwards > len(stages)) == (budget is not None)
        return {"loss": loss.detach(), "hidden": hidden.grad} | {n: p.grad for n, p in stages.named_parameters()}

    assert_same_bits(run(wrap=False), run(wrap=True))


def test_layout_of_hidden_and_second_backward() -> None:
    tensors = Case().tensors()
    hidden = tensors["hidden"].detach().transpose(0, 1).requires_grad_()
    loss = ts.linear_cross_entropy(hidden, tensors["weight"], tensors["labels"].T, chunks=4)
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden)
    (expected,) = torch.autograd.grad(plain(hidden, tensors["weight"], tensors["labels"].T, chunks=4), hidden)
    assert torch.equal(first, expected)
    assert torch.equal(first, second)


def test_a_single_row_and_no_rows() -> None:
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    row = torch.randn(WIDTH)
    one = ts.linear_cross_entropy(row, weight, torch.tensor(5))
    assert torch.equal(one, F.cross_entropy(F.linear(row, weight), torch.tensor(5)))
    empty = ts.linear_cross_entropy(row.new_empty(0, WIDTH), weight, torch.empty(0, dtype=torch.int64), reduction="sum")
    empty.backward()
    assert torch.equal(empty, torch.tensor(0.0))
    assert weight.grad is not None
    assert not weight.grad.any()


def test_without_gradients_nothing_is_kept() -> None:
    tensors = Case().tensors()
    with torch.no_grad():
        found = ts.linear_cross_entropy(**tensors)
    assert not found.requires_grad
    assert torch.equal(found, plain(**tensors))


def test_double_backward_raises() -> None:
    tensors = Case().tensors()
    with pytest.raises(GradientError, match="create_graph=True"):
        torch.autograd.grad(ts.linear_cross_entropy(**tensors), tensors["hidden"], create_graph=True)


def test_a_weight_changed_since_the_forward_raises() -> None:
    tensors = Case().tensors()
    loss = ts.linear_cross_entropy(**tensors)
    with torch.no_grad():
        tensors["weight"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"chunks": 0}, "chunks=0"),
        ({"chunks": True}, "chunks=True"),
        ({"chunks": 2.5}, r"chunks=2\.5"),
        ({"chunks": "many"}, "chunks='many'"),
        ({"reduction": "max"}, "reduction='max'"),
        ({"softcap": 0.0}, r"softcap=0\.0"),
        ({"weight": torch.zeros(VOCABULARY, WIDTH + 1)}, r"found \(3, 7, 24\) and \(130, 25\)"),
        ({"weight": torch.zeros(VOCABULARY)}, r"found \(3, 7, 24\) and \(130,\)"),
        ({"labels": torch.zeros(3, 6, dtype=torch.int64)}, r"asks for labels of shape \(3, 7\), found \(3, 6\)"),
        ({"labels": torch.zeros(SHAPE, dtype=torch.int32)}, r"found torch\.int32; pass labels\.long\(\)"),
        ({"labels": torch.zeros(SHAPE)}, r"found torch\.float32"),
        ({"bias": torch.zeros(WIDTH)}, r"a bias of shape \(130,\), found \(24,\)"),
        ({"weight": torch.zeros(VOCABULARY, WIDTH).double()}, r"found torch\.float32, torch\.float64"),
        ({"hidden": torch.zeros(WIDTH), "labels": torch.tensor(1), "shift": True}, "shift=True"),
    ],
)
def test_errors_say_what_was_found(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ts.linear_cross_entropy(**(Case().tensors() | changed))


def test_a_label_outside_the_vocabulary() -> None:
    tensors = Case().tensors()
    tensors["labels"][0, 0] = VOCABULARY
    with pytest.raises(IndexError, match="130 is out of bounds"):
        ts.linear_cross_entropy(**tensors)
