"""What commands print: tables, sizes, and errors as one message."""

import sys
from collections.abc import Iterable, Sequence

import typer
from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH_IN_FILES = 200  # of tables that go to a file or a pipe, where no terminal sets a width


class CommandError(Exception):
    """What is wrong with a command's arguments, where, and what to do."""


def print_error(error: BaseException) -> None:
    """One message on stderr, without a traceback."""
    typer.echo(f"error: {error}", err=True)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A table on stdout.

    Args:
        header: the columns' titles.
        rows: a text for each column.
        right: titles of the columns to align at the right.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in header:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else _WIDTH_IN_FILES
    # Keys hold brackets and paths, which rich would take for its markup.
    Console(width=width, markup=False, highlight=False).print(table)


def size(count: float) -> str:
    """A number of bytes as text, in the units of `--max-shard-size`."""
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"
        count /= 1000
    return f"{count:.4g} GB"
