"""How embeddings and heads that come and go are called, and which kinds there are: the bits of plain PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from living import one_process
from pairs import Pair, both, sgd
from streamable import Model
from streaming import everything
from torch import nn
from torch.nn import functional as F
from wide_pairs import CASES, case, coming, learn, pair, paired, together
from wordy import VOCABULARY, WIDTH, Outputs, Words, words

import tapestream as ts
from tapestream.errors import InputError

__all__ = ["case", "one_process", "pair"]  # fixtures


def test_evaluation_between_steps(pair: Pair) -> None:
    seen = []

    def run(model: Any, _: Any) -> None:
        model.eval()
        with torch.no_grad():
            seen.append(model(*words()))
        model.train()
        learn(model)
        with torch.inference_mode():
            seen.append(model(*words()))

    both(pair, run)
    assert all(torch.equal(a, b) for a, b in zip(seen[:6], seen[6:], strict=True))


def test_gradients_in_evaluation(pair: Pair) -> None:
    both(pair, lambda model, _: learn(model.eval()))


def test_one_process_of_many_that_could_be(pair: Pair, one_process: None) -> None:
    theirs, ours, plain, optimizer = pair
    for model, steps in ((theirs, plain), (ours, optimizer)):
        seed(3)
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(3):
            learn(parallel)
            steps.step()
            steps.zero_grad()
    assert_same(everything(theirs), everything(ours))


def test_an_optimizer_of_pytorch(pair: Pair) -> None:
    theirs, ours, _, _ = pair
    steps = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (theirs, ours)]
    both((theirs, ours, *steps), learn)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # hidden by PyTorch itself
@pytest.mark.full
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled(when: str, case: Model, tmp_path: Path) -> None:
    torch._dynamo.reset()

    def compiled() -> nn.Module:
        model = case.model()
        for part in (model.embed, model.head):
            part.compile(backend="aot_eager")
        return model

    chosen = Model(compiled, words) if when == "before" else case
    for theirs, ours, plain, optimizer in paired(chosen, tmp_path):
        if when == "after":
            for model in (theirs, ours):
                model.embed.compile(backend="aot_eager")
                model.head.compile(backend="aot_eager")
        both((theirs, ours, plain, optimizer), learn)


def test_two_models_with_one_embedding(tmp_path: Path) -> None:
    """The second, which stays plain, trains what the first has moved."""
    case = CASES["tied"]

    def second(model: Any) -> Any:
        other = Words(tied=False)
        other.embed = model.embed
        return other

    seed(8)
    for two in paired(case, tmp_path):
        others = []
        for model in two[:2]:
            seed(8)
            others.append(second(model))
        both((*others, *two[2:]), learn)
        both(two, learn)


def test_a_second_streamed_model_with_the_same_embedding_is_refused(tmp_path: Path) -> None:
    for two in paired(CASES["tied"], tmp_path):
        other = Words(tied=False)
        other.embed.weight = two[1].embed.weight
        with pytest.raises(InputError, match="streamed"):
            ts.stream(other, device="cpu", budget="1 GiB", folder=tmp_path / "other")
        both(two, learn)


# -- kinds of embeddings -----------------------------------------------------------------------------------------------


def of_kind(**knobs: Any) -> Callable[..., Words]:
    def make(*, tied: bool = False) -> Words:
        model = Words(tied=False)
        model.embed = nn.Embedding(VOCABULARY, WIDTH, **knobs)
        if tied:
            model.head.weight = model.embed.weight
        return model

    return make


KINDS = {
    "padding": {"padding_idx": 3}, "sparse": {"sparse": True}, "max_norm": {"max_norm": 1.0},
    "scaled": {"scale_grad_by_freq": True},
}  # fmt: skip


@pytest.mark.thinned(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_embeddings(kind: str, tied: bool, tmp_path: Path) -> None:
    def make() -> Words:
        return of_kind(**KINDS[kind])(tied=tied)

    def repeated() -> tuple[torch.Tensor, ...]:
        return torch.randint(0, 5, (2, 6)), torch.randint(0, VOCABULARY, (2, 6))

    def run(model: Any, _: Any) -> None:
        model(*repeated()).backward()
        if kind == "sparse" and not tied:
            assert model.embed.weight.grad.is_sparse
            model.embed.weight.grad = model.embed.weight.grad.to_dense()

    for theirs, ours, _, _ in paired(Model(make, repeated), tmp_path):
        steps = torch.optim.SGD(theirs.parameters(), lr=0.1), ts.optimizer(ours, torch.optim.SGD, lr=0.1, master=None)
        both((theirs, ours, *steps), run)


def test_a_frozen_embedding_and_a_trained_head_that_adapters_follow(tmp_path: Path) -> None:
    """What `enable_input_require_grads` of transformers does."""

    def requires(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.requires_grad_(True)

    def make() -> Words:
        model = Words(tied=False)
        model.embed.requires_grad_(False)
        model.embed.register_forward_hook(requires)
        return model

    together(Model(make, words), tmp_path, learn)


def test_a_head_that_is_called_twice(tmp_path: Path) -> None:
    class Two(Outputs):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
            x = self.embedded(tokens)
            early = self.head(x)
            loss = F.cross_entropy(early.flatten(0, -2), tokens.flatten())
            return loss + F.cross_entropy(self.head(self.hidden(x)).flatten(0, -2), targets.flatten())

    for tied in (True, False):
        together(Model(lambda tied=tied: Two(tied=tied), words), tmp_path / str(tied), learn)


def test_weights_on_meta(case: Model, tmp_path: Path) -> None:
    from safetensors.torch import save_model

    theirs = case.model()
    save_model(theirs, str(tmp_path / "model.safetensors"))
    with torch.device("meta"):
        ours = Words(tied=case is CASES["tied"], bias=case is not CASES["tied"])
    folder = tmp_path / "home"
    ts.stream(ours, device="cpu", budget="64 MiB", folder=folder, weights=tmp_path / "model.safetensors")
    assert (ours.embed.weight is ours.head.weight) == (case is CASES["tied"])
    assert_same(everything(theirs), everything(ours))
    both((theirs, ours, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), sgd(ours)), learn)
    assert coming(ours)
    ts.unstream(ours)
