"""States of several parts, what a stage makes of each, and what is left of them after a backward."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from all_fronts import Run, W, loss_of, start
from torch.utils._pytree import tree_leaves

weight = torch.linspace(-1.2, 1.1, W * W).reshape(W, W).cos().requires_grad_()


def act(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def twin() -> tuple[torch.Tensor, torch.Tensor]:
    x = start()
    return x, x


def nested(s: Any) -> Any:
    return {"x": act(s["x"]) * s["n"]["k"], "n": {"k": s["n"]["k"] + 1, "none": None, "s": s["n"]["s"]}}


@dataclass(eq=False)
class Pair:
    one: torch.Tensor
    other: int


STATES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "numbers_None_strings": (nested, lambda: {"x": start(), "n": {"k": 2, "none": None, "s": "a"}}),
    "strings_that_change": (lambda s: (act(s[0]) * len(s[1]), s[1] + "a"), lambda: (start(), "a")),
    "one_tensor_twice": (lambda s: (act(s[0]) * s[1],) * 2, twin),
    "one_tensor_twice_written": (lambda s: (lambda h: (h.add_(1), h))(act(s[0]) * s[1]), twin),
    "unused_parts": (lambda s: (act(s[0]), s[1]), lambda: (start(), start())),
    "itself": (lambda s: s, start),
    "views": (lambda s: (s[0][:], s[1].view(-1).view(4, W)), lambda: (start(), start())),
    "itself_and_its_view": (lambda s: (s[0], s[0].view(4, W)), lambda: (start(), start())),
    "detached_results": (lambda s: (act(s[0]) * s[1], act(s[0]).detach()), lambda: (start(), start().detach())),
    "integers_booleans": (
        lambda s: (act(s[0]) * s[1] * s[2], s[1] + 1, ~s[2]),
        lambda: (start(), torch.arange(W), torch.arange(W) > 3),
    ),
    "gradients_of_the_weight_alone": (act, lambda: start().detach()),
    "no_gradient_comes_out": (lambda s: act(s).detach(), start),
    "no_elements": (act, lambda: start()[:0].detach().requires_grad_()),
    "a_function": (lambda s: (s[1](s[0]), s[1]), lambda: (start(), act)),
    "an_expanded_one": (act, lambda: start()[:1].detach().requires_grad_().expand(4, W)),
    "a_dataclass": (lambda s: Pair(act(s.one) + s.other, s.other + 1), lambda: Pair(start(), 1)),
    "two_losses": (lambda s: (act(s[0]) + s[1], s[1].sin()), lambda: (start(), start())),
}


def leaves(state: Any) -> list[Any]:
    return [state.one, state.other] if isinstance(state, Pair) else tree_leaves(state)


def states_of(run: Run, make: Callable[[], Any], times: int = 2) -> Iterator[list[Any]]:
    for _ in range(times):
        state = make()
        given = [t for t in leaves(state) if isinstance(t, torch.Tensor)]
        made = leaves(run(state))
        outs = [t for t in made if isinstance(t, torch.Tensor)]
        loss = sum((loss_of(t) for t in outs if t.requires_grad), torch.zeros(()))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        same = [[a is b for a in outs] for b in outs]
        others = [t for t in made if not isinstance(t, torch.Tensor)]
        grads = [t.grad for t in [*given, weight] if t.requires_grad and t.is_leaf]
        flags = [t.requires_grad for t in outs]
        yield [*(t.detach().clone() for t in outs), *grads, others, same, flags]
        weight.grad = None
