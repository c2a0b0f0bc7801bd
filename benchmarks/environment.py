"""What a result was measured on (device, driver, versions, commit and date), and how it is written."""

import argparse
import json
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "liger-kernel")


def environment(device: str, commit: str | None) -> dict:
    """Device, driver, versions, commit, date. Asks nvidia-smi, not torch: it must not hold memory on the device.

    Args:
        device: "cuda" or "cpu".
        commit: the commit measured; asked from git where it is None and there is a repository.
    """
    name, driver = _gpu() if device == "cuda" else (platform.processor() or platform.machine(), None)
    return {
        "device": name,
        "driver": driver,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "commit": commit or _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, padded so that it also reads well in a terminal."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def describe(environment_: dict) -> str:
    """The environment as one line of text."""
    return ", ".join(f"{name} {value}" for name, value in environment_.items() if value is not None)


def recorded(options: argparse.Namespace) -> dict:
    """The options that a result keeps: all but where files lie on the machine, and what a worker process is told."""
    return {
        name: value
        for name, value in vars(options).items()
        if name not in ("output", "profile") and not name.startswith("worker")
    }


def write_report(report: dict, output: str, markdown: str) -> None:
    """The report as JSON, and its table next to it."""
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown + "\n")


def add_output_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    """Arguments that every benchmark has."""
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--output", default=output, help="JSON file; a Markdown table is written next to it")
    parser.add_argument("--commit", help="commit measured, for machines without git")
    parser.add_argument("--seed", type=int, default=0)


def _gpu() -> tuple[str, str | None]:
    if shutil.which("nvidia-smi") is None:
        return "unknown GPU", None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = answer.stdout.strip().splitlines()
    if answer.returncode or not lines:
        return "unknown GPU", None
    name, _, driver = lines[0].partition(", ")
    return name, driver


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None
    answer = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
