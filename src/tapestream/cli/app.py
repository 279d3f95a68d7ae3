"""The ``tapestream`` command."""

from typing import Annotated

import torch
import typer

import tapestream
from tapestream.cli.clean import clean
from tapestream.cli.demo import demo
from tapestream.cli.explain import explain
from tapestream.cli.machine import machine
from tapestream.cli.plan import plan
from tapestream.cli.train import train
from tapestream.cli.verify import verify


def make_app() -> typer.Typer:
    """The application with its commands."""
    app = typer.Typer(
        name="tapestream", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        help="Gradients of any size in the memory you have.",
    )  # fmt: skip
    app.callback()(_of_all)
    for command in (plan, explain, train, verify, machine, clean, demo):
        app.command()(command)
    return app


def _show_version(asked: bool) -> None:
    if not asked:
        return
    typer.echo(f"tapestream {tapestream.__version__}, PyTorch {torch.__version__}")
    raise typer.Exit


def _of_all(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and end.")
    ] = False,
) -> None:
    """Options of the command itself."""


def main() -> None:
    """Entry point of the console script."""
    make_app()()


if __name__ == "__main__":
    main()
