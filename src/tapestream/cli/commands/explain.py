"""The options of ``tapestream explain``."""

from pathlib import Path
from typing import Annotated

import typer

from tapestream.cli import checks
from tapestream.cli.ends import importing, reported
from tapestream.cli.options import Budget, Json
from tapestream.errors import InputError


@reported
def explain(
    target: Annotated[
        str,
        typer.Argument(
            help="module:function, a Python function without arguments. It is the program, or returns (program, "
            "arguments); the program is an nn.Module or any function."
        ),
    ],
    budget: Budget = None,
    planner: Annotated[str, typer.Option(help="A planner's name, or auto.")] = "auto",
    rows: Annotated[int, typer.Option(min=1, help="Saved tensors shown, heaviest first.")] = 20,
    plot: Annotated[
        Path | None, typer.Option(help="Draw live bytes over the operations into this file (.png, .pdf, .svg).")
    ] = None,
    json_: Json = False,
) -> None:
    """Show the heaviest saved tensors of a program, the lines that make them, and what the plan does with each."""
    from tapestream.cli.targets import imported

    if target.count(":") != 1:
        raise InputError(f"{target} was asked for; name module:function, a Python function without arguments")
    checks.maybe_size("--budget", budget)
    if planner != "auto":
        from tapestream.planners import planners

        checks.one_of("--planner", planner, ("auto", *planners))
    if plot is not None:
        checks.check_picture(plot)
    imported(target)
    with importing():
        from tapestream.cli.explain import told_of
    told_of(target, budget, planner, rows, plot, json_)
