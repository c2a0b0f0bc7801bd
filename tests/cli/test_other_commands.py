"""`families`, `env` and `bench`; what the command line imports."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import transformers

import liger_models
from liger_models import ops
from liger_models.auto import FAMILIES, MULTIMODAL_FAMILIES
from liger_models.cli import bench
from liger_models.kernels import registry


def rows(output: str) -> list[list[str]]:
    """The cells of printed tables' rows, headers and rules left out."""
    return [line.split() for line in output.splitlines() if line.split() and "─" not in line]


# ---------------------------------------------------------------------------------------------------------------------
# families


def test_families_lists_every_public_class(succeeds):
    found = {tuple(row[:3]) for row in rows(succeeds("families"))[1:]}
    public = {name for name in liger_models.__all__ if isinstance(getattr(liger_models, name), type)}
    public = {name for name in public if issubclass(getattr(liger_models, name), transformers.PreTrainedModel)}
    assert {cls for _, cls, _ in found} == public
    assert {model_type for model_type, _, _ in found} == {*FAMILIES, *MULTIMODAL_FAMILIES}
    for model_type, _, architecture in found:
        assert getattr(transformers, architecture).config_class.model_type == model_type


# ---------------------------------------------------------------------------------------------------------------------
# env


def test_env_as_json(succeeds):
    found = json.loads(succeeds("env", "--json", "--device", "cpu"))
    assert found["versions"]["transformers"] == version("transformers")
    assert found["versions"]["liger_models"] == liger_models.__version__
    assert found["device"] == "cpu" and found["devices"][0]["device"] == "cpu"
    choices = ops.resolve("cpu").choices
    assert found["ops"] == [{"op": op, "backend": choices[op].backend, "reason": choices[op].reason} for op in choices]
    assert {op["op"] for op in found["ops"]} == set(registry.contracts())


def test_env_as_tables(succeeds, monkeypatch):
    def none_is_installed(package):
        raise environment.PackageNotFoundError(package)

    from liger_models.cli import environment

    monkeypatch.setattr(environment, "version", none_is_installed)
    with ops.use_backend("torch"):
        found = rows(succeeds("env", "--device", "cpu"))
    assert ["triton", "not", "installed"] in found
    assert ["rms_norm", "torch", "named", "by", "the", "user"] in found


def test_env_with_an_unknown_device(refuses):
    assert refuses("env", "--device", "abacus").startswith("--device abacus: ")


def test_env_with_a_backend_that_does_not_exist(refuses, monkeypatch):
    monkeypatch.setattr(registry, "_named_backend", "abacus")  # as LIGER_BACKEND, which is read at the first import
    assert refuses("env", "--device", "cpu").startswith("no backend 'abacus'; this installation has torch, triton")


# ---------------------------------------------------------------------------------------------------------------------
# bench


def test_bench_times_every_op(succeeds):
    found = rows(succeeds("bench", "--shape", "tiny", "--backend", "torch", "--device", "cpu"))
    found = {row[0]: row[1:] for row in found if row[0] in bench.CASES}
    assert set(found) == set(bench.CASES)
    for backend, time, rate in found.values():
        assert backend == "torch" and float(time) > 0 and float(rate) > 0


def test_bench_times_what_was_asked_for(succeeds, monkeypatch):
    """The ops and backend asked for, with every gradient, and a rate that follows from the time."""
    calls = []
    monkeypatch.setattr(bench, "milliseconds", lambda step, device: calls.append([len(step()) for _ in range(2)]) or 2.0)
    found = rows(succeeds("bench", "--op", "swiglu", "--op", "rms_norm", "--backend", "torch", "--shape", "tiny"))
    assert [row[:2] for row in found if row[1] == "torch"] == [["swiglu", "torch"], ["rms_norm", "torch"]]
    assert calls == [[2, 2], [2, 2]]  # gradients of gate and up; of x and weight
    # 8 passes over 128 rows of 256 bfloat16 numbers in 2 ms
    assert next(row for row in found if row[0] == "swiglu")[2:] == ["2.0000", f"{8 * 128 * 256 * 2 / 2 / 1e6:.1f}"]


def test_bench_refuses_what_there_is_not(refuses):
    assert "--op softmax: there is none of this name; there are rms_norm, " in refuses("bench", "--op", "softmax")
    assert "--shape 70b: there is none of this name; there are tiny, 1b, 8b" in refuses("bench", "--shape", "70b")
    assert "no backend 'abacus'; this installation has torch" in refuses("bench", "--backend", "abacus")
    assert "torch finds no such device here" in refuses("bench", "--device", "mps")


def test_bench_refuses_a_backend_that_cannot_serve(refuses, monkeypatch, resolved_anew):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = refuses("bench", "--op", "rms_norm", "--backend", "triton", "--device", "cpu")
    assert "rms_norm: backend 'triton' is not available: " in message


@pytest.mark.gpu
def test_bench_and_env_on_a_gpu(succeeds):
    found = rows(succeeds("bench", "--shape", "1b"))
    assert {row[1] for row in found if row[0] in bench.CASES} == {"torch", "triton"}
    assert any(device["device"] == "cuda:0" and device["memory"] for device in json.loads(succeeds("env", "--json"))["devices"])


# ---------------------------------------------------------------------------------------------------------------------
# Imports and exit codes


@pytest.mark.parametrize("arguments", [["--help"], ["export", "--help"], ["export", "nowhere", "out"]], ids=" ".join)
def test_help_and_wrong_paths_import_nothing_heavy(arguments):
    script = f"""
import sys
from liger_models.cli import app
try:
    app({arguments!r}, prog_name="liger-models")
except SystemExit as end:
    assert end.code == {int("--help" not in arguments)}
heavy = {{"torch", "transformers", "triton", "safetensors", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_defect_keeps_its_traceback(command, monkeypatch, tmp_path):
    """Only what a user can put right becomes a message."""
    from liger_models.cli import families

    def broken():
        raise RuntimeError("a defect")

    monkeypatch.setattr(families, "families", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        command("families")
