"""The example about photographs, on pictures that stand in for those of scikit-image: it trains, answers and exports."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "describe_image.py"


@pytest.mark.timeout(300)
def test_it_tells_two_pictures_apart(tmp_path):
    # The script checks the answers itself, those of the stock class too, and ends with status 1 at the first that is wrong.
    pictures = tmp_path / "skimage" / "data"
    pictures.mkdir(parents=True)
    (tmp_path / "skimage" / "__init__.py").write_text("")
    Image.linear_gradient("L").resize((96, 96)).convert("RGB").save(pictures / "astronaut.png")
    Image.radial_gradient("L").resize((96, 160)).convert("RGB").save(pictures / "coffee.png")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, SCRIPT, "--output", tmp_path / "export"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    assert "astronaut.png: An astronaut." in process.stdout and "coffee.png: A cup of coffee." in process.stdout
    assert "astronaut.png: 5 tiles" in process.stdout and "coffee.png: 3 tiles" in process.stdout
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["architectures"] == ["InternVLForConditionalGeneration"]


def test_it_says_what_to_install(monkeypatch):
    spec = importlib.util.spec_from_file_location("describe_image", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(script.CheckFailed, match="pip install scikit-image"):
        script.photographs()
