"""The main job on real weights: the quickstart loads, compares, trains, exports and reloads SmolLM2-135M-Instruct."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_quickstart_on_a_real_model(tmp_path):
    # The script checks every step itself and ends with status 1 at the first that fails.
    command = [sys.executable, "examples/quickstart.py", "--steps", "4", "--device", "cpu", "--output", tmp_path / "export"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    assert json.loads((tmp_path / "export" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    with safe_open(next((tmp_path / "export").glob("*.safetensors")), framework="pt") as weights:
        assert "model.layers.29.self_attn.q_proj.weight" in list(weights.keys())


def test_a_missing_checkpoint_is_an_error(tmp_path):
    command = [sys.executable, "examples/quickstart.py", "--model", tmp_path / "nothing"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode != 0
    assert "nothing" in process.stdout + process.stderr
