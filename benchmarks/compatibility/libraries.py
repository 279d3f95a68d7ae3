"""Libraries for science, unmodified: those of them that are installed."""

import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.compatibility.called import CallCase, CallSubject
from benchmarks.compatibility.trial import Case

PACKAGES = ("e3nn", "torchdeq", "torchode", "deepwave", "neuralop")


def cases() -> Iterator[CallCase | Case]:
    """Solvers and layers through a program; a neural operator as a streamed model."""
    programs: dict[str, tuple[str, Callable[[], CallSubject]]] = {
        "e3nn": ("e3nn tensor products", _equivariant),
        "torchdeq": ("torchdeq equilibrium, Anderson", _equilibrium),
        "torchode": ("torchode Tsit5", _ordinary),
        "deepwave": ("deepwave scalar waves", _waves),
    }
    for package, (name, make) in programs.items():
        if importlib.util.find_spec(package) is not None:
            yield CallCase(name, "Program", make)
    if importlib.util.find_spec("neuralop") is not None:
        yield Case("neuraloperator FNO", _operator, _loss_of_fields)


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _equivariant() -> CallSubject:
    from e3nn import o3

    wide, narrow = o3.Irreps("8x0e+4x1o"), "1x0e+1x1o"
    products = nn.ModuleList(o3.FullyConnectedTensorProduct(wide, narrow, wide) for _ in range(4))
    edges = o3.spherical_harmonics(narrow, _drawn(32, 3), normalize=True)

    def whole(x: torch.Tensor) -> torch.Tensor:
        for product in products:
            x = x + product(x, edges)
        return x

    return CallSubject(products, _drawn(32, wide.dim), whole)


def _equilibrium() -> CallSubject:
    import torchdeq

    net = nn.Linear(16, 16)
    solve = torchdeq.get_deq(f_solver="anderson", f_max_iter=8, b_max_iter=8)

    def whole(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = solve(lambda z: torch.tanh(0.5 * net(z) + x), torch.zeros_like(x))[0][-1]
        return found

    return CallSubject(net, _drawn(4, 16), whole)


def _ordinary() -> CallSubject:
    import torchode

    net = nn.Linear(8, 8)
    term = torchode.ODETerm(lambda t, y: torch.tanh(net(y)))
    control = torchode.IntegralController(atol=1e-4, rtol=1e-4, term=term)
    solver = torchode.AutoDiffAdjoint(torchode.Tsit5(term=term), control)

    def whole(y: torch.Tensor) -> torch.Tensor:
        times = torch.linspace(0, 1, 5).repeat(len(y), 1)
        found: torch.Tensor = solver.solve(torchode.InitialValueProblem(y0=y, t_eval=times)).ys
        return found

    return CallSubject(net, _drawn(4, 8), whole)


class _Ground(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.speed = nn.Parameter(1500 + 100 * torch.rand(20, 20))


def _waves() -> CallSubject:
    import deepwave

    ground = _Ground()
    source, receiver = torch.tensor([[[10, 5]]]), torch.tensor([[[10, 15]]])

    def whole(amplitudes: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = deepwave.scalar(
            ground.speed, 5.0, 0.001, source_amplitudes=amplitudes, source_locations=source, receiver_locations=receiver
        )[-1]
        return found

    return CallSubject(ground, _drawn(1, 1, 40), whole)


def _operator() -> nn.Module:
    from neuralop.models import FNO

    torch.manual_seed(0)
    return FNO(n_modes=(8, 8), hidden_channels=16, in_channels=1, out_channels=1, n_layers=4)  # type: ignore[no-any-return]


def _loss_of_fields(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(_drawn(2, 1, 16, 32)).square().mean()
    return found
