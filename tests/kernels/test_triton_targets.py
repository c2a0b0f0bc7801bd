"""Every Triton kernel compiles for GPUs that are not here.

A kernel is compiled as often as the calls in `examples/<op>.py` (function `calls`) launch it with other types, constants or
alignments. A new op adds such a module; a kernel that no example launches, and no launched kernel inlines, fails.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_for_target.py"
# Bytes of shared memory that one program may have: CUDA C++ Programming Guide, compute capability 9.0; CDNA3 ISA, LDS.
TARGETS = {("cuda", "90", "32"): 232448, ("hip", "gfx942", "64"): 65536}


def compile_for(*arguments: str, cache: Path) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), *filter(None, sys.path)]),
    }
    process = subprocess.run([sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[1])
def test_every_kernel_compiles(target, tmp_path):
    report = compile_for(*target, cache=tmp_path)
    compiled = report["compiled"]
    assert compiled, "no example launched anything"
    missing = [
        name for name, callers in report["functions"].items() if name not in compiled and not set(callers) & set(compiled)
    ]
    assert not missing, f"no call in tests/kernels/examples launches {missing}"
    too_large = {name: kernel for name, kernel in compiled.items() if kernel["shared"] > TARGETS[target]}
    assert not too_large


def test_rope_compiles_once_for_all_lengths(tmp_path):
    # Report O25: a peer compiled its kernel anew for every sequence length. Here: once forwards and once backwards.
    report = compile_for("cuda", "90", "32", "rope", "every_length", cache=tmp_path)
    assert report["compiled"]["rope._rope_kernel"]["variants"] == 2
