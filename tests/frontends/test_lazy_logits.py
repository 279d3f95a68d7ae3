"""Heads whose logits are made when they are needed: the loss has the bits of its chunks in plain PyTorch, everything
else the bits of plain PyTorch, and what can be neither raises."""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tapestream as ts
from tapestream.errors import GradientError, InputError
from tapestream.frontends.lazy_logits import LazyLogits, compute_lazily, find_head

WIDTH, VOCABULARY, SHAPE, CHUNKS = 24, 130, (3, 7), 4
Operation = Callable[[Tensor], Tensor]
Result = dict[str, Tensor | None]


def head_of(lazy: bool, bias: bool = True) -> nn.Linear:
    """The same weights at every call."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    if lazy:
        compute_lazily(head, CHUNKS)
    return head


def hidden_of(shape: tuple[int, ...] = SHAPE) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, WIDTH, requires_grad=True)


def labels_of() -> Tensor:
    torch.manual_seed(2)
    return torch.randint(VOCABULARY, SHAPE).masked_fill(torch.rand(SHAPE) < 0.2, -100)


def lazy_logits() -> tuple[LazyLogits, nn.Linear, Tensor]:
    head, hidden = head_of(lazy=True), hidden_of()
    logits = head(hidden)
    assert isinstance(logits, LazyLogits)
    return logits, head, hidden


def gradients(loss: Tensor, head: nn.Linear, hidden: Tensor) -> Result:
    if loss.requires_grad:
        loss.sum().backward()
    return {"loss": loss.detach(), "hidden": hidden.grad} | {n: p.grad for n, p in head.named_parameters()}


def assert_same(expected: Result, found: Result) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (tensor is None) == (other is None), name
        if tensor is not None and other is not None:
            assert type(other) is Tensor, name
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
            assert torch.equal(tensor.nan_to_num(), other.nan_to_num()), name


def in_chunks(head: nn.Module, rows: Tensor, labels: Tensor, operation: Operation, **options: Any) -> Tensor:
    """The loss of ``operation(head(rows))`` chunk by chunk, as one would write it."""
    flat, reduction = rows.flatten(0, -2), options.pop("reduction", "mean")
    size = -(-len(flat) // CHUNKS)
    losses = [
        F.cross_entropy(operation(head(h)).float(), y, reduction="none" if reduction == "none" else "sum", **options)
        for h, y in zip(flat.split(size), labels.flatten().split(size), strict=True)
    ]
    if reduction == "none":
        return torch.cat(losses)
    total = functools.reduce(torch.add, losses)
    return total / (labels != options.get("ignore_index", -100)).sum() if reduction == "mean" else total


def same(logits: Tensor) -> Tensor:
    return logits


def next_word(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()


def flat_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.reshape(-1), **options)


# How a model makes its loss of logits and labels, and its chunks: rows of hidden states, labels, operation, options.
Styles = dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], tuple[Any, ...]]]]
STYLES: Styles = {
    "as they are": (flat_loss, lambda h, y: (h, y, same)),
    "next word": (lambda z, y: flat_loss(z.float(), next_word(y)), lambda h, y: (h, next_word(y), same)),
    "shifted": (
        lambda z, y: nn.CrossEntropyLoss()(
            z[..., :-1, :].contiguous().view(-1, z.size(-1)), y[..., 1:].contiguous().view(-1)
        ),
        lambda h, y: (h[..., :-1, :], y[..., 1:], same),
    ),
    "sliced": (lambda z, y: flat_loss(z[:, 2:].contiguous(), y[:, 2:]), lambda h, y: (h[:, 2:], y[:, 2:], same)),
    "sliced, all dimensions": (
        lambda z, y: flat_loss(z[1:, :, :], y[1:]),
        lambda h, y: (h[1:], y[1:], same),
    ),
    "capped": (
        lambda z, y: flat_loss((torch.tanh(z / 0.7) * 0.7).float(), y),
        lambda h, y: (h, y, lambda z: torch.tanh(z / 0.7) * 0.7),
    ),
    "scaled": (lambda z, y: flat_loss(2 * z.contiguous() / 3.0, y), lambda h, y: (h, y, lambda z: 2 * z / 3.0)),
    "scaled by functions": (
        lambda z, y: flat_loss(torch.div(z, 3).mul(0.5).tanh(), y),
        lambda h, y: (h, y, lambda z: torch.div(z, 3).mul(0.5).tanh()),
    ),
    "widened before a cap": (
        lambda z, y: flat_loss((z.to(torch.float32) / 0.7).tanh(), y),
        lambda h, y: (h, y, lambda z: (z.float() / 0.7).tanh()),
    ),
    "flattened": (
        lambda z, y: F.cross_entropy(z.to(z.device).flatten(0, 1), y.flatten()),
        lambda h, y: (h, y, same),
    ),
    "flattened by function": (
        lambda z, y: F.cross_entropy(torch.flatten(z, 0, -2), y.flatten()),
        lambda h, y: (h, y, same),
    ),
    "reshaped": (
        lambda z, y: F.cross_entropy(z.reshape((y.numel(), VOCABULARY)), y.flatten()),
        lambda h, y: (h, y, same),
    ),
    "options": (
        lambda z, y: flat_loss(z, y, ignore_index=3, reduction="sum", label_smoothing=0.1) / torch.tensor(37),
        lambda h, y: (h, y.clamp(min=3), same),
    ),
    "per word": (
        lambda z, y: flat_loss(z, y, reduction="none") * 0.3,
        lambda h, y: (h, y, same),
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "options": {"ignore_index": 3, "reduction": "sum", "label_smoothing": 0.1},
    "per word": {"reduction": "none"},
}
FACTORS = {"options": lambda loss: loss / torch.tensor(37), "per word": lambda loss: loss * 0.3}


def bfloat16(on: bool = True) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if on else nullcontext()


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize(("bias", "autocast"), [(True, False), (False, True), (True, True)])
def test_losses_have_the_bits_of_their_chunks(name: str, bias: bool, autocast: bool) -> None:
    style, chunked = STYLES[name]
    labels = labels_of().clamp(min=3) if name == "options" else labels_of()
    theirs, hidden = head_of(lazy=False, bias=bias), hidden_of()
    with bfloat16(autocast):
        rows, targets, operation = chunked(hidden, labels)
        expected = FACTORS.get(name, same)(in_chunks(theirs, rows, targets, operation, **OPTIONS.get(name, {})))
    ours, again = head_of(lazy=True, bias=bias), hidden_of()
    with bfloat16(autocast):
        logits = ours(again)
        found = style(logits, labels)
    assert logits.is_lazy()
    assert_same(gradients(expected, theirs, hidden), gradients(found, ours, again))


def test_the_loss_may_be_made_where_autocast_has_ended() -> None:
    results = []
    for lazy in (False, True):
        head, hidden = head_of(lazy), hidden_of()
        with bfloat16():
            logits = head(hidden) if lazy else None
            loss = None if lazy else in_chunks(head, hidden, labels_of(), same)
        loss = flat_loss(logits.float(), labels_of()) if loss is None else loss
        results.append(gradients(loss, head, hidden))
    assert_same(*results)


def with_ending(logits: Tensor) -> Tensor:
    logits[:, :, :5] = -3.0
    return flat_loss(logits.float(), labels_of())


def hooked(logits: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: 2 * gradient)
    return flat_loss(logits, labels_of())


# What needs the logits: the results have the bits of plain PyTorch.
READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: F.log_softmax(z, -1).square().mean(),
    "argmax": lambda z: z.argmax(-1),
    "widened argmax": lambda z: (z.float() / 3).view(-1, VOCABULARY).argmax(-1),
    "last word": lambda z: z[:, -1],
    "words": lambda z: z[..., :5].sum() + z[:, :, 3:4, ...].sum() + z[..., :, 1:].sum(),
    "all words": lambda z: z[:, :2, ...].sum() + z[...].mean(),
    "tensor times": lambda z: z * torch.linspace(0, 1, VOCABULARY),
    "divided by keyword": lambda z: torch.div(z, 2.0, rounding_mode="floor"),
    "whole numbers": lambda z: z.to(torch.int32),
    "view of bits": lambda z: z.detach().view(torch.int32),
    "classes second": lambda z: F.cross_entropy(z.transpose(1, 2), labels_of()),
    "weighted": lambda z: flat_loss(z, labels_of(), weight=torch.linspace(0, 1, VOCABULARY)),
    "probabilities": lambda z: F.cross_entropy(z.view(-1, VOCABULARY), torch.full((21, VOCABULARY), 1 / VOCABULARY)),
    "joined": lambda z: torch.cat([z, 2 * z]),
    "second": lambda z: torch.add(torch.ones(()), z),
    "reads of a child, then of its parent": lambda z: z.float().sum() + z.mean(),
    "no gradient": lambda z: torch.no_grad()(lambda: z.softmax(-1).sum())(),
    "inference": lambda z: torch.inference_mode()(lambda: z.sum().clone())().clone(),
    "written to, then the loss": with_ending,
    "a hook, then the loss": hooked,
    "numpy": lambda z: torch.from_numpy(z.detach().numpy().copy()),
    "list": lambda z: torch.tensor(z.tolist()),
    "deep copy": lambda z: copy.deepcopy(z.detach()),
    "pickle": lambda z: pickle.loads(pickle.dumps(z)).detach(),
    "text": lambda z: torch.tensor(list(map(ord, repr(z.detach()) + str(z.detach()) + f"{z[0, 0, 0]:.3f}"))),
    "pointer": lambda z: torch.tensor(z.data_ptr() == z.data_ptr() and z.is_contiguous() and not z.is_leaf),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("autocast", [False, True])
def test_anything_else_has_the_bits_of_plain_pytorch(name: str, autocast: bool) -> None:
    results = []
    for lazy in (False, True):
        head, hidden = head_of(lazy), hidden_of()
        with bfloat16(autocast):
            logits = head(hidden)
            if name == "view of bits":
                logits = logits.float()
            results.append(gradients(READERS[name](logits), head, hidden))
    assert_same(*results)


def test_logits_read_after_the_loss_are_made_once_and_can_be_saved() -> None:
    logits, _, _ = lazy_logits()
    flat_loss(logits, labels_of()).backward()
    assert logits.materialised() is logits.materialised()
    assert torch.equal(logits, head_of(lazy=False)(hidden_of()))
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    assert torch.equal(torch.load(file), logits)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("change", [same, Tensor.float, lambda z: z[:, 1:], lambda z: z.view(-1, VOCABULARY)])
def test_questions_are_answered_as_by_logits_and_make_nothing(autocast: bool, change: Operation) -> None:
    with bfloat16(autocast):
        real, lazy = change(head_of(lazy=False)(hidden_of())), change(head_of(lazy=True)(hidden_of()))
    assert isinstance(lazy, LazyLogits)
    for ask in (
        lambda z: z.shape, lambda z: z.dtype, lambda z: z.device, lambda z: z.requires_grad, lambda z: z.ndim,
        lambda z: (z.size(), z.size(-1), z.dim(), z.numel(), len(z), z.nbytes, z.is_cuda, z.get_device()),
        lambda z: (z.is_floating_point(), z.layout, isinstance(z, Tensor)),
    ):  # fmt: skip
        assert ask(lazy) == ask(real)
    assert lazy.is_lazy()


def test_fewer_rows_than_labels_are_refused_as_by_logits() -> None:
    logits, _, _ = lazy_logits()
    with pytest.raises(ValueError, match="to match target batch_size"):
        flat_loss(logits[:, -3:].contiguous(), labels_of())


def double(_: Any, __: Any, output: Tensor) -> Tensor:
    assert type(output) is Tensor
    return 2 * output


PLAIN: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "no gradients": torch.no_grad()(lambda head, x: head(x)),
    "frozen": lambda head, x: head.requires_grad_(False)(x.detach()),
    "forward hook": lambda head, x: (head.register_forward_hook(double), head(x))[1],
    "backward hook": lambda head, x: (head.register_full_backward_hook(lambda *_: None), head(x))[1],
    "one row": lambda head, x: head(x[0, 0]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_logits_themselves_are_returned(name: str) -> None:
    results = []
    for lazy in (False, True):
        head, hidden = head_of(lazy), hidden_of()
        logits = PLAIN[name](head, hidden)
        assert type(logits) is Tensor
        results.append(gradients(logits, head, hidden))
    assert_same(*results)


def test_inputs_that_do_not_fit_are_refused_as_by_the_head() -> None:
    for x in (torch.zeros(3, WIDTH + 1), torch.zeros(3, WIDTH).double(), torch.zeros(3, WIDTH, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match=r"mat1|dtype"):
            head_of(lazy=True)(x)


def test_a_pre_hook_is_obeyed() -> None:
    head, plain = head_of(lazy=True), head_of(lazy=False)
    head.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    logits = head(hidden_of())
    assert isinstance(logits, LazyLogits)
    assert torch.equal(logits, plain(2 * hidden_of()))


@pytest.mark.parametrize("what", ["weight", "bias", "hidden", "data"])
@pytest.mark.parametrize("read", [lambda z: z.sum(), lambda z: flat_loss(z, labels_of())])
def test_operands_changed_since_then_raise(what: str, read: Operation) -> None:
    logits, head, hidden = lazy_logits()
    if what == "data":
        head.weight.data = head.weight.data.clone()
    else:
        with torch.no_grad():
            {"weight": head.weight, "bias": head.bias, "hidden": hidden}[what].mul_(2)
    with pytest.raises(GradientError, match=r"had changed.*read them before, or pass loss_chunks=None"):
        read(logits)


def test_logits_made_before_the_weights_changed_are_kept() -> None:
    logits, head, _ = lazy_logits()
    before = logits.sum()
    with torch.no_grad():
        head.weight.mul_(2)
    assert torch.equal(logits.sum(), before)


def test_what_was_derived_before_a_change_in_place_raises() -> None:
    logits, _, _ = lazy_logits()
    flat = logits.view(-1, VOCABULARY)
    halves = logits / 2
    flat.mul_(3)
    assert torch.equal(logits, 3 * head_of(lazy=False)(hidden_of()))  # a view was written to
    for read in (lambda: halves.sum(), lambda: F.cross_entropy(halves.view(-1, VOCABULARY), labels_of().flatten())):
        with pytest.raises(GradientError, match=r"changed in place.*make that tensor after the change"):
            read()


@pytest.mark.parametrize(
    "ask",
    [
        lambda logits, loss: logits.register_hook(same),
        lambda logits, loss: logits.retain_grad(),
        lambda logits, loss: torch.autograd.grad(loss, logits, allow_unused=True),
    ],
)
def test_gradients_of_logits_cannot_be_had_from_a_loss_by_chunks(ask: Callable[[Tensor, Tensor], object]) -> None:
    logits, _, _ = lazy_logits()
    loss = flat_loss(logits.float(), labels_of())
    with pytest.raises(GradientError, match=r"gradient of logits was asked for.*pass loss_chunks=None"):
        ask(logits, loss)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_code_that_cannot_be_followed_raises_and_loses_no_gradient() -> None:
    logits, _, _ = lazy_logits()
    with pytest.raises(GradientError, match=r"a custom autograd Function took them.*logits\.clone\(\)"):
        Doubled.apply(logits).sum().backward()
    with pytest.raises(GradientError, match="a custom autograd Function"):
        torch.autograd.backward(lazy_logits()[0], torch.ones(*SHAPE, VOCABULARY))
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(GradientError, match="otherwise than from Python"):
        lazy_logits()[0].exp()
    results = []
    for lazy in (False, True):
        head, hidden = head_of(lazy), hidden_of()
        results.append(gradients(Doubled.apply(head(hidden).clone()).sum(), head, hidden))
    assert_same(*results)


def test_the_peak_of_a_loss_holds_no_logits() -> None:
    head = nn.Linear(64, 20_000, bias=False)
    compute_lazily(head, "auto")
    hidden, labels = torch.randn(512, 64, requires_grad=True), torch.randint(20_000, (512,))
    with ts.track_memory() as meter:
        logits = head(hidden)
        F.cross_entropy((torch.tanh(logits / 3) * 3).float(), labels).backward()
    assert logits.is_lazy()
    assert meter.peak_nbytes < 4 * head.weight.nbytes < logits.nbytes


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Model(nn.Module):
    def __init__(self, head: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = head

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head


def test_a_patched_head_is_refused() -> None:
    model = Model(nn.Linear(4, 4))
    assert find_head(model, None, []) is model.head
    model.head.forward = lambda x: x
    with pytest.raises(InputError, match=r"forward is nn\.Linear's own"):
        find_head(model, None, [])


REFUSED: dict[str, tuple[Model, dict[str, Any], str]] = {
    "chunks": (Model(nn.Linear(4, 4)), {"loss_chunks": 0}, r"loss_chunks=0 is neither \"auto\" nor a positive"),
    "truth": (Model(nn.Linear(4, 4)), {"loss_chunks": True}, "loss_chunks=True is neither"),
    "head alone": (Model(nn.Linear(4, 4)), {"head": "head"}, "head='head' is used by loss_chunks alone"),
    "none": (Model(None), {"loss_chunks": 2}, r"looked for it at get_output_embeddings\(\), .* Model is nothing; name"),
    "class": (Model(Adapted(4, 4)), {"loss_chunks": 2}, r"which in this Model is a Adapted; name the layer"),
    "name": (Model(None), {"loss_chunks": 2, "head": "top"}, r"looked for it at head='top', which in this Model is no"),
    "block": (Model(None), {"loss_chunks": 2, "head": "blocks.1"}, "head='blocks.1' lies in one; leave it out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_are_refused_by_name_and_left_alone(name: str) -> None:
    model, options, text = REFUSED[name]
    classes = [type(m) for m in model.modules()]
    with pytest.raises(InputError, match=text):
        ts.stream(model, device="cpu", **options)
    assert [type(m) for m in model.modules()] == classes
