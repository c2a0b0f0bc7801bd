"""Does a checkpoint come back bit for bit after load and export?"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from liger_models.cli.export import check_space, load, readable_class, writing_to, written_bytes
from liger_models.cli.output import CommandError, print_table
from liger_models.cli.source import CheckpointFolder, weight_files

_SHOWN = 20


def verify(source: CheckpointFolder, against: Path | None, scratch: Path | None) -> bool:
    """Load `source`, export it into a temporary folder, and compare every tensor with `against`, or with `source`.

    A quantised checkpoint is exported in its own format. A checkpoint in the native packed layout, which a stock export cannot
    give back, is compared with a packed export; `against` is always compared with the stock export.

    Args:
        scratch: where the temporary folder is made; it is removed in any case.

    Returns:
        Whether all names, shapes, dtypes and bits are equal.

    Raises:
        CommandError, UnsupportedModelError, CheckpointError: what is wrong and what to do.
    """
    cls = readable_class(source)
    expected = Weights(against or source.path)
    scratch = scratch or Path(tempfile.gettempdir())
    if not scratch.is_dir():
        raise CommandError(f"--scratch {scratch} is not a folder")
    check_space(scratch, written_bytes(cls, source, "auto", source.weight_format))
    model = load(cls, source)
    # A stock checkpoint has the parts of packed layers, which are no parameters of the model.
    packed = against is None and set(expected) <= set(model.state_dict())
    with tempfile.TemporaryDirectory(prefix="liger-models-verify-", dir=scratch) as exported:
        with writing_to(Path(exported)):
            model.save_pretrained(exported, weight_format=source.weight_format, save_original_format=not packed)
        del model
        with Weights(Path(exported)) as actual, expected:
            differing = list(differences(expected, actual))
            _report(cls, source.path, against, packed, len(expected), differing)
    return not differing


class Weights(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read from its file when asked for. Files are closed on leaving a `with` block.

    Raises:
        CommandError: the folder has no weights, or not all that its index names.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise CommandError(f"{folder} is not a folder: give that of a checkpoint")
        self._open = ExitStack()
        self._readers: dict[str, Callable[[str], Tensor]] = {}
        for file in weight_files(folder):
            if file.suffix == ".safetensors":
                reader = self._open.enter_context(safe_open(file, framework="pt"))
                self._readers |= dict.fromkeys(reader.keys(), reader.get_tensor)
            else:
                tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
                self._readers |= dict.fromkeys(tensors, tensors.__getitem__)

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name](name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._readers.clear()


def differences(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """(name, what differs) of each tensor that is not the same in both, sorted by name."""
    for name in sorted({*expected, *actual}):
        if name not in actual:
            yield name, "not in the export"
        elif name not in expected:
            yield name, "only in the export"
        else:
            difference = _difference(expected[name], actual[name])
            if difference:
                yield name, difference


def _difference(expected: Tensor, actual: Tensor) -> str | None:
    if expected.shape != actual.shape:
        return f"shape {list(expected.shape)}, exported {list(actual.shape)}"
    if expected.dtype != actual.dtype:
        return f"{_name(expected)}, exported {_name(actual)}"
    expected_bits, actual_bits = _bits(expected), _bits(actual)
    if torch.equal(expected_bits, actual_bits):
        return None
    different = (expected_bits != actual_bits).view(-1, expected.element_size()).any(1).sum()
    return f"{different} of {expected.numel()} numbers"


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bits(tensor: Tensor) -> Tensor:
    # By value, a NaN would differ from itself and -0.0 would equal 0.0.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _report(cls: type, source: Path, against: Path | None, packed: bool, count: int, differing: list[tuple[str, str]]) -> None:
    layout = "packed export" if packed else "export"
    other = "it" if against is None else str(against)
    if not differing:
        print(f"{source}: read by {cls.__name__}; all {count} tensors of its {layout} equal those of {other}, bit for bit")
        return
    print(f"{source}: read by {cls.__name__}; {len(differing)} tensors of its {layout} differ from those of {other}")
    print_table(("tensor", "difference"), differing[:_SHOWN])
    if len(differing) > _SHOWN:
        print(f"... and {len(differing) - _SHOWN} more")
