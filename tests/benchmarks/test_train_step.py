"""The benchmark of training steps, run as a user runs it, on a tiny model on CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "train_step.py"


def run(output: Path, *arguments: str, path: Path | None = None) -> dict:
    """The script's report. `path` comes first among the folders in which it finds packages."""
    folders = [str(folder) for folder in (path, ROOT) if folder is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(SCRIPT), "--shape", "tiny", "--device", "cpu", "--batch", "2", "--length", "16"]
    command += ["--steps", "2", "--warmup", "2", "--output", str(output), *arguments]
    subprocess.run(command, env=environment, check=True, cwd=ROOT)
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict:
    """One run of stock, of a Liger-Kernel that breaks at import, and of the native classes."""
    folder = tmp_path_factory.mktemp("train_step")
    broken = folder / "packages" / "liger_kernel"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    arguments = ("--implementations", "stock,liger-kernel,native", "--dtype", "fp32", "--commit", "0123abc")
    profile = folder / "profile.md"
    report = run(folder / "results.json", *arguments, "--profile", str(profile), path=broken.parent)
    return {"json": report, "markdown": (folder / "results.md").read_text(), "profile": profile.read_text()}


def row(reports: dict, implementation: str) -> dict:
    return next(row for row in reports["json"]["rows"] if row["implementation"] == implementation)


def test_a_failing_implementation_is_a_row_with_its_error(reports):
    assert [row["implementation"] for row in reports["json"]["rows"]] == ["stock", "liger-kernel", "native"]
    assert row(reports, "liger-kernel")["error"] == "ImportError: broken on purpose"
    assert "liger-kernel failed: ImportError: broken on purpose" in reports["markdown"]
    assert "step_ms" not in row(reports, "liger-kernel")


def test_what_is_measured(reports):
    stock = row(reports, "stock")
    assert len(stock["all_step_ms"]) == 2 and len(stock["losses"]) == 4
    assert min(stock["all_step_ms"]) <= stock["step_ms"] <= max(stock["all_step_ms"])
    assert stock["tokens_per_second"] == pytest.approx(2 * 16 / stock["step_ms"] * 1000)
    assert stock["peak_gib"] is None and stock["reserved_gib"] is None  # there is no device memory to measure
    # per layer 64·(64+2·32) + 64·64 + 3·64·160 weights, 2 layers, 64·320 for the head, 6 operations each; causal attention
    weights = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 160) + 64 * 320
    assert reports["json"]["model_flops_per_step"] == 2 * (6 * weights * 16 + 3 * 2 * 2 * 16**2 * 64)
    assert stock["parameters"] == weights + 64 * 320 + 5 * 64


def test_the_environment_is_recorded(reports):
    environment = reports["json"]["environment"]
    assert environment["commit"] == "0123abc"
    assert environment["torch"] and environment["transformers"] and environment["date"]


def test_the_optimizer_trains(reports):
    losses = row(reports, "stock")["losses"]
    assert losses[-1] < losses[0]  # the same batch in every step


def test_native_starts_from_the_stock_weights_and_takes_the_same_steps(reports):
    stock, native = row(reports, "stock"), row(reports, "native")
    assert "error" not in native, native["error"]
    assert native["parameters"] == stock["parameters"]
    # fp32: losses near 6 are sums of some 1e3 rounded terms; four AdamW steps at 1e-5 differ by signs of tiny gradients
    assert native["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert native["loss_difference"] == native["losses"][0] - stock["losses"][0]
    assert native["time_over_stock"] == native["step_ms"] / stock["step_ms"]
    assert native["time_over_liger_kernel"] is None  # it failed, so there is no such ratio


def test_the_profile_names_what_ran(reports):
    assert "# stock" in reports["profile"] and "aten::mm" in reports["profile"]


def test_weights_do_not_depend_on_the_process_and_do_on_the_seed(reports, tmp_path):
    arguments = ("--implementations", "stock,stock", "--optimizer", "none", "--dtype", "fp32", "--seed", "1")
    first, second = (row["losses"] for row in run(tmp_path / "results.json", *arguments)["rows"])
    assert first == second
    assert first[0] == first[-1]  # no optimizer: the weights stay
    assert first[0] != row(reports, "stock")["losses"][0]


def test_an_unknown_implementation_is_refused():
    command = [sys.executable, str(SCRIPT), "--implementations", "stock+fast"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "'stock+fast' is none of stock, liger-kernel, native" in answer.stderr
