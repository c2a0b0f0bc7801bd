"""The benchmark of attention, run as a user runs it, at tiny sizes on CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "attention_times.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    output = tmp_path_factory.mktemp("attention_times") / "out.json"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable, str(SCRIPT), "--device", "cpu", "--shapes", "tiny,tiny causal", "--providers", "native,sdpa",
        "--output", str(output),
    ]  # fmt: skip
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, cwd=ROOT)
    assert output.with_suffix(".md").exists()
    return json.loads(output.read_text())


def test_what_runs_agrees_with_float64(report):
    served = {(row["shape"], row["provider"]): row for row in report["rows"] if "error" not in row}
    assert served.keys() == {("tiny", "native"), ("tiny causal", "native"), ("tiny causal", "sdpa")}
    for row in served.values():
        assert row["errors"].keys() >= {"output", "q", "k", "v"}
        # bf16 keeps 8 bits: each rounding is off by 2**-9 on average at most, and torch's kernel chains four
        assert all(error < 4 * 2**-8 for error in row["errors"].values()), row


def test_rates_count_visible_pairs(report):
    row = next(row for row in report["rows"] if (row["shape"], row["provider"]) == ("tiny", "native"))
    visible = sum(min(query + 1, 7) for query in range(24)) * 2 * 4
    assert row["forward_tflops"] * row["forward_ms"] * 1e9 == pytest.approx(4 * 16 * visible)


def test_what_cannot_run_is_a_row_with_the_reason(report):
    (failed,) = [row for row in report["rows"] if "error" in row]
    assert (failed["shape"], failed["provider"]) == ("tiny", "sdpa")
    assert failed["error"].startswith("ValueError: scaled_dot_product_attention has no window")
