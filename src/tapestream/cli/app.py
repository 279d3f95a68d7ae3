"""The ``tapestream`` command. What its commands do is imported when they do it: PyTorch takes seconds."""

from typing import Annotated

import typer

from tapestream.cli.commands.clean import clean
from tapestream.cli.commands.demo import demo
from tapestream.cli.commands.explain import explain
from tapestream.cli.commands.machine import machine
from tapestream.cli.commands.plan import plan
from tapestream.cli.commands.train import train
from tapestream.cli.commands.verify import verify


def make_app() -> typer.Typer:
    """The application with its commands."""
    app = typer.Typer(
        name="tapestream", no_args_is_help=True, pretty_exceptions_enable=False,
        help="Gradients of any size in the memory you have.",
    )  # fmt: skip
    app.callback()(_of_all)
    for command in (plan, explain, train, verify, machine, clean, demo):
        app.command()(command)
    return app


def _show_version(asked: bool) -> None:
    if not asked:
        return
    from importlib.metadata import PackageNotFoundError, version

    import tapestream

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "of no version"
    typer.echo(f"tapestream {tapestream.__version__}, PyTorch {torch}")
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
