"""What a user installs: the wheel and the sdist hold every module as a plain file and nothing that is not the package."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_SHIPPED = ("tests/", "benchmarks/", "examples/", "kernels/", "conversions/")


def build(source: Path, kind: str, into: Path) -> Path:
    """Build a "wheel" or an "sdist" of a source tree with the build tools that are installed here."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(into), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (archive,) = into.iterdir()
    return archive


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The files that git tracks or would track, in a folder of their own: a build must not write into the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    copy = tmp_path_factory.mktemp("source")
    for name in filter(None, listed.stdout.split("\0")):
        file, target = ROOT / name, copy / name
        if os.path.lexists(file):
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.is_symlink():
                target.symlink_to(os.readlink(file))
            else:
                target.write_bytes(file.read_bytes())
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def modules_of(source: Path) -> set[str]:
    """Every Python file of the package, links followed, by its path in the wheel."""
    return {
        str(Path(folder, file).relative_to(source))
        for folder, _, files in os.walk(source / "liger_models", followlinks=True)
        for file in files
        if file.endswith(".py")
    }


def test_wheel_holds_the_package_and_nothing_else(source, wheel):
    names = names_in(wheel)
    assert {name for name in names if name.endswith(".py")} == modules_of(source)
    assert {"liger_models/kernels/rms_norm.py", "liger_models/py.typed"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(NOT_SHIPPED)]


def test_wheel_installs_the_command_line(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        assert archive.read(name).decode().split() == ["[console_scripts]", "liger-models", "=", "liger_models.cli:main"]
    assert callable(import_module("liger_models.cli").main)


def test_wheel_from_the_sdist_is_the_same(source, wheel, tmp_path):
    sdist = build(source, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert names_in(build(unpacked, "wheel", tmp_path / "wheel")) == names_in(wheel)


def test_every_module_of_the_installed_wheel_imports(source, wheel, tmp_path):
    pytest.importorskip("triton", reason="the Triton backend's modules import triton")
    installed = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed), str(wheel)],
        check=True,
        capture_output=True,
    )
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in sorted(modules_of(source))]
    script = f"""
import importlib, sys
sys.path.insert(0, {str(installed)!r})
for name in {modules!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(installed)!r}), f"{{name}} came from {{module.__file__}}"
import liger_models
for name in liger_models.__all__:
    getattr(liger_models, name)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"TRITON_INTERPRET": "1"}
    imported = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert imported.returncode == 0, imported.stderr
