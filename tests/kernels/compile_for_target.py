"""Compile every kernel that the examples launch for a GPU that is not here. A script: Triton must not be in its interpreter.

    python compile_for_target.py cuda 90 32
    python compile_for_target.py hip gfx942 64
    python compile_for_target.py cuda 90 32 rope every_length      # one op, and another function of its examples

Triton's own launch path runs up to the launch itself: it specialises the arguments and compiles. So the signatures and
constants are those that the backend passes. Prints a JSON object: "compiled" has for each kernel (`module.kernel`) the
number of its compiled variants and their largest shared memory in bytes; "functions" has for each function under @triton.jit
that the backend's modules define the kernels that inline it.
"""

import ast
import importlib
import importlib.util
import json
import pkgutil
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from liger_models import ops
from liger_models.kernels.backends import triton as backend
from liger_models.kernels.backends.triton import launch

EXAMPLES = Path(__file__).parent / "examples"
# Per multiprocessor: bytes of shared memory and how many multiprocessors, for the backend's choice of launch parameters.
SHARED_MEMORY = {"cuda": 233472, "hip": 65536}


class Compiler:
    """A Triton driver for a target that is not here: enough of one for compiling."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def stand_in_for(target: GPUTarget) -> None:
    """Let the backend take CPU tensors for tensors on the target, and compile where it would launch."""
    triton.runtime.driver.set_active(Compiler(target))
    JITFunction.__getitem__ = lambda kernel, grid: lambda *args, **options: kernel.warmup(*args, grid=grid, **options)
    backend.DEVICES = (*backend.DEVICES, "cpu")
    launch.shared_memory = lambda device: SHARED_MEMORY[target.backend]
    launch.multiprocessors = lambda device: 132


def jit_functions() -> dict[str, JITFunction]:
    """Every @triton.jit function of the backend by `module.function`, without its decorators."""
    found = {}
    for module in pkgutil.iter_modules(backend.__path__):
        loaded = importlib.import_module(f"{backend.__name__}.{module.name}")
        for name, value in vars(loaded).items():
            while hasattr(value, "fn") and not isinstance(value, JITFunction):
                value = value.fn  # an autotuner or heuristics around the kernel
            if isinstance(value, JITFunction) and value.fn.__module__ == loaded.__name__:
                found[f"{module.name}.{name}"] = value
    return found


def run_examples(op: str = "*", function: str = "calls") -> None:
    """Make the calls that `function` of the modules `examples/<op>.py` yields."""
    for path in sorted(EXAMPLES.glob(f"{op}.py")):
        spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for arguments in getattr(module, function)():
            run(path.stem, *arguments)


def run(op: str, *arguments) -> None:
    """Forward, and backward from every output that has a gradient."""
    with ops.use_backend("triton"):
        outputs = getattr(ops, op)(*arguments)
    outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(o, torch.Tensor)]
    differentiable = [o for o in outputs if o.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.ones_like(o) for o in differentiable])


def report(kernels: dict[str, JITFunction]) -> dict:
    result = {"functions": {name: sorted(called_by(name, kernels)) for name in kernels}, "compiled": {}}
    for name, kernel in kernels.items():
        variants = list(kernel.device_caches[0][0].values()) if 0 in kernel.device_caches else []
        if variants:
            result["compiled"][name] = {"variants": len(variants), "shared": max(v.metadata.shared for v in variants)}
    return result


def called_by(name: str, kernels: dict[str, JITFunction]) -> set[str]:
    """The functions that inline a function, by a name that means it in their module, or inline one that does."""
    callers = set()
    for other, kernel in kernels.items():
        names = {node.id for node in ast.walk(ast.parse(kernel.src)) if isinstance(node, ast.Name)}
        if other != name and any(kernel.fn.__globals__.get(mentioned) is kernels[name] for mentioned in names):
            callers |= {other} | called_by(other, kernels)
    return callers


if __name__ == "__main__":
    name, architecture, warp, *chosen = sys.argv[1:]
    stand_in_for(GPUTarget(name, int(architecture) if architecture.isdigit() else architecture, int(warp)))
    run_examples(*chosen)
    print(json.dumps(report(jit_functions())))
