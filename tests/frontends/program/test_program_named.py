"""Programs that the library's promise names: bit for bit plain PyTorch's where stretches of them run again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from side_by_side import compare, hear_followed, least
from test_program_exact import leaf, weights
from torch import nn
from torch.nn import functional

from tapestream.frontends.program.program import Program

CALLS = 6
OTHERWISE = CALLS - 1
"""This call is given numbers that are far from those before."""


def near(x: torch.Tensor) -> torch.Tensor:
    """Other numbers in every call, in the first ones so near each other that the same branches are taken."""
    return x * (1 + (0.5 if torch.initial_seed() >= OTHERWISE else 0.001) * torch.randn_like(x.detach()))


def check(
    function: Callable[..., Any],
    leaves: Sequence[torch.Tensor],
    make: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> Program:
    """In the first call, planned ones, followed ones, and one that is given other numbers."""
    names = hear_followed(monkeypatch)
    lowest = max(least(function, leaves, make, seed) for seed in (0, OTHERWISE))
    names.clear()
    run = compare(function, leaves, make, 4 * lowest // 3, calls=CALLS, planner="auto", reruns=True, **options)
    assert names, "no call followed the last one"
    return run


@pytest.mark.full
def test_a_beam_search_that_stops_when_its_scores_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    beams, words = 3, 10
    embedding, step, out = weights((words, 16), (16, 16), (16, words))
    x, lengths = leaf(16), []

    def program(x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, scores = x.expand(beams, -1), x.new_zeros(beams)
        tokens, history = torch.zeros(beams, dtype=torch.long), torch.zeros(beams, 0, dtype=torch.long)
        finished: list[torch.Tensor] = []
        for position in range(20):
            hidden = torch.tanh(hidden @ step + embedding[tokens])
            chances = functional.log_softmax(3 * hidden @ out, dim=-1)
            totals = (scores[:, None] + chances)[: beams if position else 1]
            scores, best = totals.flatten().topk(beams)
            parents, tokens = best // words, best % words
            hidden = hidden.index_select(0, parents) * chances.gather(0, parents[:, None].expand(-1, words)).exp().sum()
            history = torch.cat([history[parents], tokens[:, None]], dim=1)
            ended = tokens == 0
            if ended.any():
                finished.append(scores[ended].max() / (position + 1) ** 0.5)
                scores = scores.masked_fill(ended, -1e4)
            if finished and max(finished).item() > scores.max().item() / 4:
                break
        lengths.append(position)
        return {"scores": scores, "best": max(finished, default=scores.max()), "history": history, "hidden": hidden}

    check(program, [embedding, step, out, x], lambda: (near(x),), monkeypatch)
    assert len(set(lengths)) > 1


@pytest.mark.full
def test_points_drawn_into_an_image_by_their_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    side = 8
    points, colours, texture = leaf(40, 3), *weights((40, 3), (1, 3, side, side))
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(5)))[0]

    def program(points: torch.Tensor) -> tuple[torch.Tensor, ...]:
        image = torch.zeros(side * side, 3)
        for _ in range(8):
            order = points[:, 2].argsort(descending=True)
            flat, depth = points[order][:, :2].sigmoid(), points[:, 2].gather(0, order)
            row, column = (flat.detach() * side).long().clamp(max=side - 1).unbind(1)
            cell = (row * side + column)[:, None].expand(-1, 3)
            sampled = functional.grid_sample(texture, 2 * flat[None, None] - 1, align_corners=False)[0, :, 0].t()
            weight = torch.exp(-((flat * side - row.unsqueeze(1)) ** 2).sum(1, keepdim=True) / side)
            colour = weight * (torch.tanh(colours)[order] + sampled)
            layer = torch.zeros(side * side, 3).scatter_add(0, cell, colour)
            depths = torch.zeros(side, side).index_put_((row, column), depth * weight[:, 0], accumulate=True)
            depths = depths.index_put((column, row), weight[:, 0], accumulate=True)
            image = 0.7 * image + layer * torch.sigmoid(depths).view(-1, 1)
            seen = torch.empty_like(points).index_copy(0, order, image.gather(0, cell))
            points = (points + 0.1 * torch.sin(seen - colours)) @ turn
        return image.view(side, side, 3), points, order

    check(program, [points, colours, texture], lambda: (near(points),), monkeypatch)


def test_generators_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    (w,) = weights((16, 16))
    x, given_up = leaf(8, 16), []

    def states(x: torch.Tensor) -> Iterator[torch.Tensor]:
        try:
            while True:
                x = torch.tanh(x @ w)
                yield x
                x = x * torch.sigmoid(x)
        finally:
            given_up.append(x.sum())

    def scaled(x: torch.Tensor) -> Any:
        factor = yield x
        while True:
            x = torch.sin(x * factor)
            factor = yield x

    def both(x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from (pair for _, pair in zip(range(5), zip(states(x), states(x + 1), strict=True), strict=False))

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        total = x.new_zeros(())
        for k, state in enumerate(states(x)):
            total = total + (state * x).sum()
            if k == 6 or total > 1e3:
                break
        waves = scaled(state)
        next(waves)
        for k in range(4):
            x = waves.send(torch.cos(x) + k)
        parts = [a * b for a, b in both(x)]
        return [total, sum((torch.exp(-p).mean() for p in parts), total), torch.stack(tuple(p.relu() for p in parts))]

    check(program, [w, x], lambda: (near(x),), monkeypatch)
    assert given_up


@dataclass
class Body:
    place: torch.Tensor
    speed: torch.Tensor
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scene:
    bodies: list[Body]
    forces: dict[str, tuple[torch.Tensor, torch.Tensor]]
    name: str = "scene"


def test_dataclasses_and_dictionaries_inside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    (w, v), x, y = weights((8, 8), (8, 8)), leaf(6, 8), leaf(4, 8)

    def make() -> tuple[Scene, dict[str, Any]]:
        bodies = [Body(near(x), torch.zeros(6, 8), {"mass": near(y)[0]}), Body(near(y), torch.ones(4, 8))]
        return Scene(bodies, {"spring": (w, v.t() * 1.0)}), {"steps": 6, "drag": {"by": torch.rand(8)}}

    def moved(body: Body, scene: Scene, drag: torch.Tensor) -> Body:
        a, b = scene.forces["spring"]
        speed = drag * body.speed + torch.tanh(body.place @ a) * torch.cos(body.place @ b)
        return Body(body.place + 0.1 * speed * body.tags.get("mass", 1.0), speed, body.tags | {"energy": speed.norm()})

    def program(scene: Scene, options: dict[str, Any]) -> dict[str, Any]:
        energies: dict[int, list[torch.Tensor]] = {}
        for k in range(options["steps"]):
            bodies = [moved(body, scene, options["drag"]["by"]) for body in scene.bodies]
            scene = Scene(bodies, scene.forces, f"after {k}")
            energies[k] = [body.tags["energy"] for body in bodies]
        return {"scene": scene, "energies": energies, "total": {"of": (sum(sum(e) for e in energies.values()), None)}}

    run = check(program, [w, v, x, y], make, monkeypatch)
    last = run(*make())["scene"]
    assert isinstance(last, Scene)
    assert (last.name, last.bodies[0].tags.keys()) == ("after 5", {"mass", "energy"})


def test_tensors_of_many_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    single, rows = weights((16, 16), (5, 16))
    (double,), (half,) = weights((16, 16), dtype=torch.float64), weights((16, 16), dtype=torch.bfloat16)
    x, y = leaf(8, 16), leaf(16, dtype=torch.float64)

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = torch.zeros(8, 16, dtype=torch.int32)
        for k in range(8):
            exact = torch.tanh(x.double() @ double + y)
            rough = torch.sigmoid(x.bfloat16() @ half)
            mask = exact > rough
            count += mask.int() * (k + 1)
            index = (count.sum(1) % 5).to(torch.int64)
            x = torch.where(mask, exact.float(), rough) * rows[index]
            x = x @ single + (x * mask).sum() / mask.sum() + (count % 3).type_as(x) * x.to(torch.float16).to(x.dtype)
            y = y * exact[index[0]] + x.mean(0)
        return x, y, rough, mask, count, index, x.bfloat16()

    check(program, [single, rows, double, half, x, y], lambda: (near(x), near(y)), monkeypatch)


class Scratch(nn.Module):
    """Calls that are told where to write, into buffers and into what the program makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mix = weights((16, 16), (16, 16))
        self.sums, self.seen = nn.Buffer(torch.zeros(16)), nn.Buffer(torch.zeros(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product, top, where = torch.empty(8, 16), torch.empty(8, 4), torch.empty(8, 4, dtype=torch.long)
        halves, fixed = torch.zeros(2, 8, 16), self.mix.detach()
        for k in range(8):
            torch.add(x.detach(), self.sums, alpha=0.1, out=self.seen)
            torch.matmul(self.seen, fixed, out=product)
            with torch.no_grad():
                torch.mul(x, self.weight[:8], out=halves[k % 2])
                torch.add(self.sums, x.mean(0), out=self.sums)
            torch.topk(product, 4, out=(top, where))
            share = torch.sigmoid(top, out=torch.empty(0))
            x = torch.tanh(x @ self.weight + product.sigmoid() @ self.mix) * (1 + halves.sum(0).cos())
            x = x + x.gather(1, where.clone()).sum(1, keepdim=True).sin() * share.mean()
        return x + product


def test_results_written_where_calls_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Scratch(), leaf(8, 16)
    check(net, [*net.parameters(), x], lambda: (near(x),), monkeypatch, modules=[net])


def test_an_lstm_over_lists_of_unequal_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    wx, wh, b = weights((8, 64), (16, 64), (64,))
    words = leaf(30, 8)

    def make() -> tuple[list[list[torch.Tensor]]]:
        rows, lengths = near(words).unbind(), (9, 4, 12) if torch.initial_seed() < OTHERWISE else (3, 13, 6)
        return ([list(rows[k : k + length]) for k, length in zip((0, 9, 13), lengths, strict=True)],)

    def program(sentences: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        outs: list[list[torch.Tensor]] = []
        for sentence in sorted(sentences, key=len, reverse=True):
            h, c, out = torch.zeros(16), torch.zeros(16), []
            for word in sentence:
                i, f, g, o = (word @ wx + h @ wh + b).chunk(4)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                out.append(h)
            outs.append(out)
        return outs

    check(program, [wx, wh, b, words], make, monkeypatch)
