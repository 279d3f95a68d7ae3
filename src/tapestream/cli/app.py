"""The ``tapestream`` command."""

import typer

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
    for command in (plan, explain, train, verify, machine, clean, demo):
        app.command()(command)
    return app


def main() -> None:
    """Entry point of the console script."""
    make_app()()


if __name__ == "__main__":
    main()
