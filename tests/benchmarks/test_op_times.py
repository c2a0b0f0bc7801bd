"""The benchmark of single ops, run as a user runs it, at tiny sizes on CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from liger_models.kernels.registry import contracts

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "op_times.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("op_times")
    (folder / "liger_kernel.py").write_text("raise ImportError('broken on purpose')\n")
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--device", "cpu", "--output", str(folder / "out.json")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, cwd=ROOT)
    return json.loads((folder / "out.json").read_text())


def test_every_op_runs_and_agrees_with_float64(report):
    served = [row for row in report["rows"] if row["provider"] in ("torch", "native")]
    assert {row["op"] for row in served} >= {"rms_norm"}
    for row in served:
        assert "error" not in row, row
        assert any(name.startswith("gradient of") for name in row["errors"]), row
        # bf16 keeps 8 bits: each rounding is off by 2**-9 on average at most, and no op here chains more than four
        assert all(error < 4 * 2**-8 for error in row["errors"].values()), row
        assert row["total_ms"] == pytest.approx(row["forward_ms"] + row["backward_ms"])


def test_what_cannot_run_is_a_row_with_the_reason(report):
    for row in report["rows"]:
        if row["provider"] == "liger-kernel":
            assert row["error"] == "ImportError: broken on purpose"
        if row["op"] not in contracts():
            assert row["error"] == "the kernel set has no such op yet"
