"""Imports point one way: the edges of the design, held on the source of every file.

A part of the package may import its own part and those that `ALLOWED` names. To add an edge, change the design first.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from liger_models import _MODULE_OF

ROOT = Path(__file__).parents[1]
FOLDERS = ("liger_models", "kernels", "conversions", "tests", "benchmarks", "examples")
OUTSIDE = {"tests", "benchmarks", "examples"}

ALLOWED = {
    "package": {"ops", "losses", "auto", "models", "layers", "conversions", "compat"},  # only names for type checkers
    "cli": {"package", "auto", "conversions", "models", "ops", "pretrained"},
    "auto": {"models", "compat"},
    "models": {"decoder", "moe", "multimodal", "pretrained", "layers", "losses", "conversions", "compat"},
    "decoder": {"pretrained", "attention", "layers", "compat"},
    "moe": {"decoder", "layers", "compat"},  # what decoders with routed experts share
    "multimodal": {"decoder", "pretrained", "compat"},  # what models that see images share
    "attention": {"layers", "ops"},  # what transformers' attention interface calls "liger"
    "pretrained": {"layers"},  # loading and saving, which models that are not decoders share too
    "layers": {"ops"},
    "losses": {"ops"},
    "ops": {"kernels"},
    "conversions": {"compat"},
    "kernels": set(),
    "backends": {"kernels"},
    "compat": set(),
}
# What a part may import from outside besides the standard library; a part that is not named may import anything.
EXTERNAL = {"kernels": {"torch"}, "backends": {"torch", "triton"}, "compat": {"transformers"}, "package": set()}


def violations(source: str, path: str) -> list[str]:
    """The broken rules in a file's source, each as `path:line: rule`. `path` is relative to the root of the repository."""
    tree, broken = ast.parse(source, path), []
    importer = module_of(path)
    for line, target in imports(tree, importer, path.endswith("__init__.py")):
        broken += [f"{path}:{line}: {rule}" for rule in broken_by_import(importer, target)]
    if importer != "liger_models.compat":
        broken += [
            f"{path}:{line}: only liger_models/compat.py may ask for transformers.__version__: put the difference there"
            for line in version_reads(tree)
        ]
    return broken


def broken_by_import(importer: str, target: str) -> Iterator[str]:
    part, imported = part_of(importer), part_of(target)
    top = target.partition(".")[0]
    if top in ("kernels", "conversions"):
        yield f"the bare name {top!r} is another package once installed: import liger_models.{top}"
    elif part in OUTSIDE:
        return
    elif part not in ALLOWED:
        yield f"the design has no rule for {part}: add it there, then to ALLOWED"
    elif target.startswith("transformers.models.") and any(name.startswith("modeling_") for name in target.split(".")):
        yield f"{target}: stock modelling code is never imported; an upgrade of it must not be able to break this package"
    elif imported is None:
        if part in EXTERNAL and top not in EXTERNAL[part] | sys.stdlib_module_names and not is_vendor(importer):
            yield f"{part} may import {', '.join(sorted(EXTERNAL[part])) or 'nothing'} from outside, not {top}"
    elif imported != part and imported not in ALLOWED[part]:
        yield f"{part} may import {', '.join(sorted({part} | ALLOWED[part]))}, not {imported} ({target})"
    elif part == imported == "backends" and backend_of(importer) != backend_of(target):
        yield f"backend {backend_of(importer)!r} may not import backend {backend_of(target)!r} ({target})"


def imports(tree: ast.AST, importer: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of all that a module imports, anywhere in it; of `from a import b`, the name `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, importer, is_package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) == "import_module" and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value


def absolute(node: ast.ImportFrom, importer: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = importer.split(".")
    parents = parents[: len(parents) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def called(node: ast.Call) -> str | None:
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def version_reads(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "transformers.__version__":
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "transformers":
            yield from (node.lineno for alias in node.names if alias.name == "__version__")


def module_of(path: str) -> str:
    """Import path of a file: the top-level folders of kernels and conversions are seen through their links."""
    parts = list(Path(path).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    if parts[0] in ("kernels", "conversions"):
        parts.insert(0, "liger_models")
    return "tests.conftest" if parts == ["conftest"] else ".".join(parts)


def part_of(module: str) -> str | None:
    """The part of the repository that a dotted name belongs to, or None for what is outside."""
    top, *rest = module.split(".")
    if top in OUTSIDE:
        return top
    if top != "liger_models":
        return None
    if rest and rest[0] in _MODULE_OF:  # a public name, which the package resolves lazily
        return part_of(_MODULE_OF[rest[0]])
    if rest[:2] == ["kernels", "backends"]:
        return "backends"
    is_module = rest and (rest[0] in ALLOWED or any((ROOT / "liger_models").glob(f"{rest[0]}.py")))
    return rest[0] if is_module else "package"


def backend_of(module: str) -> str:
    """`triton` of liger_models.kernels.backends.triton.rms_norm."""
    return ".".join(module.split(".")[3:4])


def is_vendor(module: str) -> bool:
    return part_of(module) == "backends" and backend_of(module).startswith("_")


def files() -> list[str]:
    found = [path for folder in FOLDERS if not (ROOT / folder).is_symlink() for path in walk(ROOT / folder)]
    return sorted(str(path.relative_to(ROOT)) for path in [ROOT / "conftest.py", *found])


def walk(folder: Path) -> Iterator[Path]:
    """Python files below a folder. Links are not followed: kernels and conversions are walked where they are."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)
        elif path.suffix == ".py":
            yield path


def test_every_file_keeps_the_rules():
    broken = [rule for path in files() for rule in violations((ROOT / path).read_text(encoding="utf-8"), path)]
    assert not broken, "\n".join(broken)


def test_the_walk_sees_every_folder():
    seen = set(files())
    assert {"conftest.py", "kernels/registry.py", "kernels/backends/triton/rms_norm.py", "tests/test_imports.py"} <= seen
    assert {"liger_models/ops.py", "liger_models/cli/__init__.py"} <= seen
    assert not any(path.startswith(("liger_models/kernels/", "liger_models/conversions/")) for path in seen)


def test_folders_that_must_not_be_packages():
    found = [
        path
        for path in files()
        if path in ("kernels/__init__.py", "kernels/backends/__init__.py", "conversions/__init__.py")
        or (path.startswith("tests/") and path.endswith("/__init__.py"))
    ]
    assert not found, f"{found}: remove; at the root these folders would shadow packages of the same names"


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("kernels/rms_norm.py", "\nfrom liger_models import ops", "kernels/rms_norm.py:2: kernels may import kernels, not ops"),
        ("kernels/rope.py", "import liger_models.kernels.backends.triton.rope", "kernels may import kernels, not backends"),
        ("kernels/rope.py", "from .backends.triton import rope", "kernels may import kernels, not backends"),
        ("kernels/rope.py", "import transformers", "kernels may import torch from outside, not transformers"),
        ("kernels/rope.py", "def f():\n    import triton", "kernels/rope.py:2: kernels may import torch from"),
        ("kernels/backends/triton/rope.py", "from liger_models import ops", "backends may import backends, kernels, not ops"),
        ("kernels/backends/triton/rope.py", "from .._acme import rope", "backend 'triton' may not import backend '_acme'"),
        ("liger_models/ops.py", "from liger_models.layers import norm", "ops may import kernels, ops, not layers"),
        ("liger_models/layers/norm.py", "from liger_models.kernels.rms_norm import rms_norm", "layers, ops, not kernels"),
        ("liger_models/layers/norm.py", "from ..models import llama", "layers may import layers, ops, not models"),
        ("liger_models/layers/norm.py", "from liger_models import LigerLlamaModel", "layers, ops, not models"),
        ("liger_models/layers/norm.py", "import liger_models.compat", "layers may import layers, ops, not compat"),
        ("liger_models/decoder.py", "from liger_models import models", "not models"),
        ("liger_models/models/llama.py", "from liger_models import ops", "not ops"),
        ("liger_models/models/llama.py", "import_module('liger_models.ops')", "not ops"),
        ("liger_models/auto.py", "import liger_models.conversions.llama", "auto may import auto, compat, models"),
        ("conversions/llama.py", "import liger_models.models.llama", "conversions may import compat, conversions, not models"),
        ("liger_models/compat.py", "import torch", "compat may import transformers from outside, not torch"),
        ("liger_models/compat.py", "from liger_models import ops", "compat may import compat, not ops"),
        ("liger_models/__init__.py", "import torch", "package may import nothing from outside, not torch"),
        ("liger_models/auto.py", "from transformers.models.llama.modeling_llama import LlamaMLP", "stock modelling code"),
        ("liger_models/models/llama.py", "from transformers.models.llama import modeling_llama", "stock modelling code"),
        ("conversions/llama.py", "import transformers\nx = transformers.__version__", "llama.py:2: only liger"),
        ("tests/test_x.py", "from transformers import __version__", "tests/test_x.py:1: only liger_models/compat.py"),
        ("tests/test_x.py", "import kernels", "the bare name 'kernels'"),
        ("examples/x.py", "from conversions.llama import mapping", "the bare name 'conversions'"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_with_file_and_line(path, source, rule):
    found = violations(source, path)
    assert len(found) == 1 and rule in found[0], found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/geglu.py", "import torch, math\nfrom liger_models.kernels.registry import contract"),
        ("kernels/backends/triton/rope.py", "import triton\nfrom liger_models.kernels.rope import rope\nfrom . import launch"),
        ("kernels/backends/_acme/rope.py", "import torch_acme"),
        ("liger_models/models/llama.py", "from transformers.modeling_utils import PreTrainedModel\nfrom ..layers import norm"),
        ("liger_models/models/llama.py", "from transformers import LlamaConfig\nfrom liger_models import compat, losses"),
        ("liger_models/compat.py", "import functools\nimport transformers\nx = transformers.__version__"),
        ("liger_models/cli/env.py", "from liger_models import __version__, register_auto_models"),
        ("tests/x.py", "from transformers.models.llama.modeling_llama import LlamaMLP\nfrom liger_models import ops"),
    ],
)
def test_allowed_imports_are_not_reported(path, source):
    assert violations(source, path) == []
