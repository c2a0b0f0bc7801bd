"""A checkpoint folder, looked at before anything heavy is imported or loaded."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_models.cli.output import CommandError

# In the order in which transformers looks for them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Weights in any format, and what a training run leaves beside them.
_NOT_COPIED = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|npz)|.*\.index\.json|config\.json|\..*")
_COPIED_FOLDERS = ("additional_chat_templates",)


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint's folder and the content of its config.json, which names a model type."""

    path: Path
    config: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "CheckpointFolder":
        """Read config.json. Raises CommandError where it, or the folder, is missing or not readable."""
        if not path.exists():
            raise CommandError(f"{path} does not exist; give the folder of a checkpoint (download a hub id first)")
        if not path.is_dir():
            raise CommandError(f"{path} is a file; give the folder that holds config.json and the weights")
        file = path / "config.json"
        if not file.is_file():
            raise CommandError(f"{path} has no config.json: it is not the folder of a checkpoint")
        config = _json(file)
        if "model_type" not in config:
            raise CommandError(f"{file} names no model_type: which class reads the checkpoint cannot be told")
        return cls(path, config)

    @property
    def model_type(self) -> str:
        return self.config["model_type"]

    @property
    def architecture(self) -> str | None:
        """The stock class that the configuration names, if it does."""
        return next(iter(self.config.get("architectures") or ()), None)

    @property
    def weight_format(self) -> str:
        """ "stock", or the method by which the weights are quantised ("mxfp4")."""
        return (self.config.get("quantization_config") or {}).get("quant_method", "stock")

    def other_files(self) -> list[Path]:
        """Tokenizer, processor, chat templates, licence, relative to the folder: what goes with a checkpoint beside its weights
        and configuration."""
        files = [file for file in self.path.iterdir() if file.is_file() and not _NOT_COPIED.fullmatch(file.name)]
        for name in _COPIED_FOLDERS:
            files += [file for file in (self.path / name).rglob("*") if file.is_file()]
        return sorted(file.relative_to(self.path) for file in files)


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint, from its index if it has one.

    Raises:
        CommandError: there are none, or the index names one that is not there.
    """
    found = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if found is None:
        raise CommandError(f"{folder} has no weights: none of {', '.join(_WEIGHTS)}")
    if found.suffix != ".json":
        return [found]
    files = sorted({folder / name for name in _json(found).get("weight_map", {}).values()})
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise CommandError(f"{found} names files that are not there ({', '.join(missing)}): download or copy them again")
    return files


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CommandError(f"{file} is not valid JSON ({error}); download or copy it again") from None
    if not isinstance(content, dict):
        raise CommandError(f"{file} does not hold a JSON object; download or copy it again")
    return content
