"""Versions, devices, and what each op runs on."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from liger_models import __version__, ops
from liger_models.cli.output import CommandError, print_table, size

_PACKAGES = ("torch", "transformers", "triton", "safetensors", "accelerate", "peft")


def environment(device: str | None, *, as_json: bool) -> None:
    """Print what runs here, as tables or as JSON.

    Raises:
        CommandError: torch has no such device type.
        KernelUnavailableError: LIGER_BACKEND names a backend that does not exist.
    """
    found = collect(device)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    versions = {name: number or "not installed" for name, number in found["versions"].items()}
    print_table(("", "version"), [("platform", found["platform"]), ("python", found["python"]), *versions.items()])
    print_table(("device", "name", "memory"), [(d["device"], d["name"], d["memory"]) for d in found["devices"]])
    print(f"kernel set for {found['device']}:")
    print_table(("op", "backend", "reason"), [(op["op"], op["backend"], op["reason"]) for op in found["ops"]])


def collect(device: str | None) -> dict[str, Any]:
    """What `environment` prints, of plain types."""
    device = device_type(device)
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"liger_models": __version__, **{name: _version(name) for name in _PACKAGES}},
        "devices": _devices(),
        "device": device,
        "ops": [
            {"op": choice.op, "backend": choice.backend, "reason": choice.reason}
            for choice in ops.resolve(device).choices.values()
        ],
    }


def device_type(device: str | None) -> str:
    """The device type that a command runs on. Raises CommandError for one that torch does not know."""
    try:
        return torch.device(device or ops.infer_device()).type
    except RuntimeError as error:
        raise CommandError(f"--device {device}: {str(error).splitlines()[0]}") from None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[dict[str, str]]:
    found = [{"device": "cpu", "name": platform.processor() or platform.machine(), "memory": ""}]
    accelerator = ops.infer_device()
    if accelerator == "cpu":
        return found
    module = torch.get_device_module(accelerator)
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        memory = getattr(properties, "total_memory", None)
        found.append(
            {
                "device": f"{accelerator}:{index}",
                "name": getattr(properties, "name", accelerator),
                "memory": "" if memory is None else size(memory),
            }
        )
    return found
