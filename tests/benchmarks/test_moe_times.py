"""The benchmark of routed experts, run as a user runs it, at tiny sizes on CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "moe_times.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    output = tmp_path_factory.mktemp("moe_times") / "out.json"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable, str(SCRIPT), "--device", "cpu", "--shapes", "tiny gpt-oss,tiny qwen3", "--output", str(output),
        "--providers", "native,stock@eager,liger-kernel",
    ]  # fmt: skip
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, cwd=ROOT)
    assert output.with_suffix(".md").exists()
    return json.loads(output.read_text())


def test_what_runs_agrees_with_float64(report):
    served = {(row["shape"], row["provider"]): row for row in report["rows"] if "error" not in row}
    assert served.keys() >= {(s, p) for s in ("tiny gpt-oss", "tiny qwen3") for p in ("native", "stock@eager")}
    for row in served.values():
        assert row["errors"].keys() >= {"output", "x", "expert_weights", "gate_up_weight", "down_weight"}
        # bf16 keeps 8 bits: each rounding is off by 2**-9 on average at most, and the stock activation chains six
        assert all(error < 6 * 2**-8 for error in row["errors"].values()), row


def test_rates_count_three_products(report):
    row = report["rows"][0]
    operations = 3 * 2 * (24 * 2) * 32 * 48
    assert row["forward_tflops"] * row["forward_ms"] * 1e9 == pytest.approx(operations)
    assert row["backward_tflops"] * row["backward_ms"] * 1e9 == pytest.approx(2 * operations)


def test_what_cannot_run_is_a_row_with_the_reason(report):
    failed = {(row["shape"], row["provider"]): row["error"] for row in report["rows"] if "error" in row}
    assert failed["tiny gpt-oss", "liger-kernel"] == "ValueError: LigerExperts has no biases and no clamped activation"
