"""Write any checkpoint that a native class reads as a stock checkpoint."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from liger_models.cli.families import class_for
from liger_models.cli.output import CommandError, size
from liger_models.cli.source import CheckpointFolder, weight_files
from liger_models.pretrained import LigerPreTrainedModel, staged

_SIZE = re.compile(r"\s*\d+(\.\d+)?\s*[KMGT]B\s*", re.IGNORECASE)
HEADERS = 1_000_000  # bytes of weight files' headers, their index and the configuration: some hundred bytes for each tensor


def export(
    source: CheckpointFolder, destination: Path, dtype: str, weight_format: str, max_shard_size: str, *, force: bool
) -> None:
    """Read `source`, write `destination`.

    Everything that can be refused is refused before weights are read; the files appear in place once all of them are whole.

    Args:
        dtype: name of a torch dtype, or "auto".
        weight_format: "stock" or "mxfp4".
        max_shard_size: as in save_pretrained ("5GB").
        force: write into a folder that holds files. Those of the same names are replaced, weights too, and others stay.

    Raises:
        CommandError, UnsupportedModelError, CheckpointError: what is wrong and what to do.
    """
    cls = readable_class(source)
    if not _SIZE.fullmatch(max_shard_size):
        raise CommandError(f"--max-shard-size {max_shard_size!r} is not a size: give a number in KB, MB, GB or TB (5GB)")
    check_format(cls, weight_format)
    _check_destination(source.path, destination, force=force)
    check_space(destination, written_bytes(cls, source, dtype, weight_format))
    model = load(cls, source, dtype)
    with writing_to(destination), staged(destination, commit=True) as stage:
        model.save_pretrained(stage, weight_format=weight_format, max_shard_size=max_shard_size)
        copied = _copy(source, stage)
    print(f"{source.path} -> {destination}: {cls.__name__} as {cls.stock_name}, {_content(destination)}")
    if copied:
        print(f"copied: {', '.join(map(str, copied))}")


def readable_class(source: CheckpointFolder) -> type[LigerPreTrainedModel]:
    """The native class for a checkpoint whose files are there and whose weights are in a format that it reads."""
    cls = class_for(source)
    if source.weight_format not in cls.weight_formats:
        raise CommandError(
            f"{source.path} holds weights quantised with {source.weight_format!r}, which {cls.__name__} does not read: load it "
            f"with the stock class, dequantise it, save_pretrained it, and give that folder"
        )
    weight_files(source.path)
    return cls


def check_format(cls: type[LigerPreTrainedModel], weight_format: str) -> None:
    """Raise CommandError unless the class writes the format."""
    if weight_format not in cls.weight_formats:
        raise CommandError(f"{cls.__name__} cannot write {weight_format!r}: it writes {', '.join(cls.weight_formats)}")


def _check_destination(source: Path, destination: Path, *, force: bool) -> None:
    if destination.resolve() == source.resolve():
        raise CommandError(f"{destination} is the source itself: give another folder")
    if destination.exists() and not destination.is_dir():
        raise CommandError(f"{destination} is a file: give a folder")
    if destination.is_dir() and any(destination.iterdir()) and not force:
        raise CommandError(f"{destination} is not empty: give another folder, or --force to write into it")
    parent = existing_parent(destination)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise CommandError(f"{destination} cannot be made: {parent} is not a folder that this user may write to")


def existing_parent(path: Path) -> Path:
    """The path itself if it exists, else the nearest folder above it that does."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def check_space(folder: Path, needed: int) -> None:
    """Raise CommandError, with how much is missing, unless the disk of `folder` has room for `needed` bytes."""
    free = shutil.disk_usage(existing_parent(folder)).free
    if needed > free:
        raise CommandError(
            f"{folder}: {size(needed)} are to be written and {size(free)} are free, {size(needed - free)} too little: make "
            f"room or write to another disk"
        )


def written_bytes(cls: type[LigerPreTrainedModel], source: CheckpointFolder, dtype: str, weight_format: str) -> int:
    """The size of the export, from the shapes of a model without storage."""
    assert cls.config_class is not None
    config: Any = cls.config_class.from_pretrained(source.path)
    with torch.device("meta"):
        parameters = list(cls(config).parameters())  # a tied weight once
    # "auto" of a configuration that names no dtype is that of the first weight, at most fp32.
    kept = config.dtype or config.get_text_config().dtype or torch.float32
    itemsize = (kept if dtype == "auto" else getattr(torch, dtype)).itemsize
    weights = sum(parameter.numel() * _bytes_of_number(parameter, itemsize, weight_format) for parameter in parameters)
    return round(weights) + HEADERS + sum((source.path / name).stat().st_size for name in source.other_files())


def _bytes_of_number(parameter: torch.Tensor, itemsize: int, weight_format: str) -> float:
    # Stacked experts, the only weights of three dimensions: 4 bits each and a scale of 8 bits for 32.
    return 17 / 32 if weight_format == "mxfp4" and parameter.ndim == 3 else itemsize


def load(cls: type[LigerPreTrainedModel], source: CheckpointFolder, dtype: str = "auto") -> LigerPreTrainedModel:
    """The model on the CPU, every key of the checkpoint accounted for. Raises CheckpointError."""
    return cls.from_pretrained(source.path, dtype=dtype if dtype == "auto" else getattr(torch, dtype))


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn what writing files raises into a CommandError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CommandError(f"{folder} could not be written, and is as it was: {error}") from None


def _copy(source: CheckpointFolder, stage: Path) -> list[Path]:
    """Copy what goes with the checkpoint and was not written with it; the copied names, relative to the folder."""
    names = [name for name in source.other_files() if not (stage / name).exists()]
    for name in names:
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.path / name, stage / name)
    return names


def _content(destination: Path) -> str:
    files = weight_files(destination)
    noun = "weight file" if len(files) == 1 else "weight files"
    return f"{len(files)} {noun}, {size(sum(file.stat().st_size for file in files))}"
