"""The commands and their options.

What a command does is in a module of its own, imported when it runs: `liger-models --help` imports neither torch nor
transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from liger_models.cli.output import CommandError, print_error
from liger_models.cli.source import CheckpointFolder

app = typer.Typer(
    help="Checkpoints, kernels and timings of Liger-native models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The entry point `liger-models`."""
    app(prog_name="liger-models")


class Dtype(str, Enum):
    """What `export --dtype` takes; "auto" is what the checkpoint's configuration says."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Format(str, Enum):
    """What `export --format` takes."""

    stock = "stock"
    mxfp4 = "mxfp4"


Source = Annotated[Path, typer.Argument(help="Folder of a checkpoint that a native class reads.", show_default=False)]
Device = Annotated[str | None, typer.Option(help="Device type; without it, the accelerator that torch finds, else cpu.")]


@app.command()
def export(
    source: Source,
    destination: Annotated[Path, typer.Argument(help="Folder for the stock checkpoint.", show_default=False)],
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; auto keeps what the configuration says.")] = Dtype.auto,
    format: Annotated[Format, typer.Option(help="mxfp4 quantises the experts of GPT-OSS.")] = Format.stock,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, in KB, MB, GB or TB.")] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that holds files.")] = False,
) -> None:
    """Write SOURCE as a stock checkpoint, with its tokenizer and processor files.

    SOURCE may be a stock checkpoint, the native packed layout (save_original_format=False), or GPT-OSS in MXFP4.
    """
    _run("export", _checkpoint(source), destination, dtype.value, format.value, max_shard_size, force=force)


@app.command()
def verify(
    source: Source,
    against: Annotated[
        Path | None, typer.Option(help="Compare the export with this checkpoint, not with SOURCE.", show_default=False)
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="Folder for the temporary export; without it, the system's.", show_default=False)
    ] = None,
) -> None:
    """Load SOURCE, export it, and compare every tensor: name, shape, dtype and bits. Exits with 1 if any differs."""
    same = _run("verify", _checkpoint(source), against, scratch)
    raise typer.Exit(0 if same else 1)


@app.command()
def families() -> None:
    """List the native classes and the stock architectures that they read and write."""
    _run("families")


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    device: Device = None,
) -> None:
    """Show versions, devices, and which implementation each op gets on this device, and why."""
    _run("environment", device, as_json=as_json)


@app.command()
def bench(
    op: Annotated[list[str] | None, typer.Option(help="Op to time; may be given again. Without it, all.")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Backend to time; may be given again. Without it, torch and what the op resolves to."),
    ] = None,
    shape: Annotated[str | None, typer.Option(help="tiny, 1b or 8b; without it, tiny on a CPU, else 8b.")] = None,
    device: Device = None,
) -> None:
    """Time forward and backward of single ops on random bfloat16 data."""
    _run("bench", op or [], backend or [], shape, device)


def _checkpoint(source: Path) -> CheckpointFolder:
    """A folder that holds a checkpoint, by its config.json: a wrong path is refused before torch is imported."""
    with _errors_as_messages():
        return CheckpointFolder.read(source)


def _run(command: str, *arguments: Any, **options: Any) -> Any:
    """Call the function of a command, which is named as its module."""
    with _errors_as_messages():
        return getattr(import_module(f"liger_models.cli.{command}"), command)(*arguments, **options)


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    """What a user can put right is one message and exit code 1. Anything else is a defect and keeps its traceback."""
    try:
        yield
    except CommandError as error:
        print_error(error)
        raise typer.Exit(1) from None
    except _expected() as error:
        print_error(error)
        raise typer.Exit(1) from None


def _expected() -> tuple[type[BaseException], ...]:
    # Only evaluated once an exception is on its way: these modules import torch and transformers.
    from liger_models.auto import UnsupportedModelError
    from liger_models.ops import KernelUnavailableError
    from liger_models.pretrained import CheckpointError

    return CheckpointError, UnsupportedModelError, KernelUnavailableError
