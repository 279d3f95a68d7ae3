"""The peers' side of ``loop_beside.py``: run by a Python that has jax, equinox and pyrevolve, but perhaps no PyTorch.

Reads a line for each thing to do, writes one for each thing done; all of them JSON.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy

Array = Any
SLOTS = 40


def data(problem: str, size: int) -> list[numpy.ndarray]:
    """Initial state first, then what gets a gradient beside it: the same numbers for both sides."""
    random = numpy.random.default_rng(0)
    if problem == "tanh":
        shapes, scale = ((64, size), (size, size), (size,)), (1.0, size**-0.5, 1.0)
        return [(random.standard_normal(s) * x).astype("f4") for s, x in zip(shapes, scale, strict=True)]
    state = numpy.zeros((2, size, size), "f4")
    state[:, size // 2, size // 2] = 1.0
    return [state, random.uniform(0.1, 0.4, (size, size)).astype("f4")]


def equinox_gradient(problem: str, size: int) -> Callable[[int], list[Array]]:
    """The gradient by equinox's checkpointed while loop, compiled once for all lengths."""
    import equinox.internal
    import jax
    from jax import numpy as jnp

    def step(state: Array, *leaves: Array) -> Array:
        if problem == "tanh":
            weight, bias = leaves
            return jnp.tanh(state @ weight + bias)
        (courant,) = leaves
        u, before = state
        around = jnp.pad(u, 1)
        near = around[2:, 1:-1] + around[:-2, 1:-1] + around[1:-1, 2:] + around[1:-1, :-2]
        return 2 * u - before + courant * (near - 4 * u), u

    def loss(leaves: tuple[Array, ...], steps: Array) -> Array:
        state, *rest = leaves

        def body(carry: Array) -> Array:
            number, state = carry
            return number + 1, step(state, *rest)

        state = state if problem == "tanh" else (state[0], state[1])
        _, state = equinox.internal.while_loop(
            lambda carry: carry[0] < steps, body, (0, state), kind="checkpointed", checkpoints=SLOTS
        )
        return (state if problem == "tanh" else state[0]).sum()

    compiled = jax.jit(jax.grad(loss))
    leaves = tuple(jnp.asarray(array) for array in data(problem, size))
    return lambda steps: [numpy.asarray(found) for found in jax.block_until_ready(compiled(leaves, steps))]


def shifted(state: numpy.ndarray, cotangent: numpy.ndarray | None = None) -> numpy.ndarray:
    """A step on an array, x <- 0.999 x, or given a cotangent its adjoint: so cheap that overhead is all there is."""
    return (state if cotangent is None else cotangent) * numpy.float32(0.999)


def pyrevolve_gradient(size: int) -> Callable[[int], list[Array]]:
    """The adjoint by pyrevolve, with its checkpoints in memory."""
    import pyrevolve

    class State(pyrevolve.Checkpoint):  # type: ignore[misc]
        def __init__(self) -> None:
            self.now = numpy.ones(size, "f4")
            self.cotangent = numpy.ones(size, "f4")

        dtype = numpy.float32

        @property
        def size(self) -> int:
            return size

        def get_data(self, timestep: int) -> list[numpy.ndarray]:
            return [self.now]

        def get_data_location(self, timestep: int) -> list[numpy.ndarray]:
            return [self.now]

    class Forward(pyrevolve.Operator):  # type: ignore[misc]
        def __init__(self, state: State) -> None:
            self.state = state

        def apply(self, t_start: int, t_end: int, **_: object) -> None:
            state = self.state.now
            for _ in range(t_start, t_end):
                state = shifted(state)
            self.state.now[:] = state

    class Reverse(Forward):
        def apply(self, t_start: int, t_end: int, **_: object) -> None:
            for _ in range(t_start, t_end):
                self.state.cotangent = shifted(self.state.now, self.state.cotangent)

    def run(steps: int) -> list[Array]:
        state = State()
        revolver = pyrevolve.MemoryRevolver(state, Forward(state), Reverse(state), SLOTS, steps)
        revolver.apply_forward()
        revolver.apply_reverse()
        return [state.cotangent]

    return run


def main() -> None:
    """Serve until the input ends: {"steps": n, "show": bool}."""
    library, problem, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    run = equinox_gradient(problem, size) if library == "equinox" else pyrevolve_gradient(size)
    run(2)
    print(json.dumps({"version": __import__(library).__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        found = run(asked["steps"])
        answer = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        answer["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if asked["show"]:
            answer["gradients"] = [array.ravel()[:1000].tolist() for array in found]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
