"""Rules that hold for every op with a Triton implementation, on the call `small()` of its module `examples/<op>.py`."""

import importlib.util
import itertools
import logging
import pkgutil
from pathlib import Path

import pytest
import torch
from checks import EPSILON, assert_close, check_op, gradients, to_device

from liger_models import ops
from liger_models.kernels import registry
from liger_models.kernels.backends import triton as backend

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parent / "examples").glob("*.py"))}
# fp32 throughout: sums of a few dozen terms, each right to one spacing of the largest
TOLERANCE = 32 * EPSILON[torch.float32]


def example(op: str) -> tuple:
    """The small call's arguments, defaults filled in."""
    spec = importlib.util.spec_from_file_location(f"example_{op}", EXAMPLES[op])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return registry.contracts()[op].arguments(module.small(), {})


def differentiable(op: str, arguments: tuple) -> list[str]:
    contract = registry.contracts()[op]
    return [n for n, v in zip(contract.names, arguments) if n in contract.differentiable and v is not None]


def as_double(arguments: tuple) -> list:
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]


def placed(arguments: tuple, device: str) -> list:
    return [to_device(a, device) if isinstance(a, torch.Tensor) else a for a in arguments]


def on_cpu(tensors: dict) -> dict:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def test_every_implemented_op_has_an_example():
    implemented = {module.name for module in pkgutil.iter_modules(backend.__path__)} & registry.contracts().keys()
    assert implemented == EXAMPLES.keys()


@pytest.mark.parametrize("op", EXAMPLES)
def test_each_choice_of_frozen_inputs(device, op):
    arguments = example(op)
    names = differentiable(op, arguments)
    for count in range(len(names) + 1):
        for wanted in itertools.combinations(names, count):
            check_op(op, *arguments, backend="triton", tolerance=TOLERANCE, wanted=wanted, device=device)


@pytest.mark.parametrize("op", EXAMPLES)
def test_transposed_inputs(device, op):
    arguments = [
        a.transpose(-1, -2).contiguous().transpose(-1, -2)
        if isinstance(a, torch.Tensor) and a.dim() > 1
        else torch.stack((a, a), -1)[..., 0]
        if isinstance(a, torch.Tensor) and a.dim() == 1
        else a
        for a in example(op)
    ]
    check_op(op, *arguments, backend="triton", tolerance=TOLERANCE, device=device)


def summed(op_function, chosen: int | None):
    """The op with its outputs (or one of them) summed: backward then starts from a stride-0 gradient (report O33)."""

    def function(*arguments):
        outputs = op_function(*arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        used = [o for index, o in enumerate(outputs) if chosen in (None, index) and o is not None and o.requires_grad]
        return sum(output.sum() * (1 + index) for index, output in enumerate(used))

    return function


@pytest.mark.parametrize("op", EXAMPLES)
def test_expanded_gradients_and_unused_outputs(device, op):
    arguments, contract = example(op), registry.contracts()[op]
    for chosen in (None, *range(len(contract.outputs))):
        exact = input_gradients(summed(contract.reference, chosen), as_double(arguments), op)
        with ops.use_backend("triton"):
            actual = input_gradients(summed(getattr(ops, op), chosen), placed(arguments, device), op)
        # An argument that a chosen output does not depend on: torch says None, and so may we, or zero.
        actual = {n: g for n, g in actual.items() if n in exact or g.any()}
        assert_close(on_cpu(actual), exact, TOLERANCE)


def input_gradients(function, arguments, op: str) -> dict:
    """Gradients by argument name, without those that are None."""
    names = registry.contracts()[op].names
    wanted = differentiable(op, arguments)
    arguments = [a.detach().requires_grad_() if n in wanted else a for n, a in zip(names, arguments)]
    total = function(*arguments)
    if isinstance(total, torch.Tensor):
        total.backward()
    return {n: a.grad for n, a in zip(names, arguments) if n in wanted and a.grad is not None}


@pytest.mark.parametrize("op", EXAMPLES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(device, op, dynamic):
    arguments, contract = placed(example(op), device), registry.contracts()[op]
    wanted = differentiable(op, arguments)
    torch.compiler.reset()
    with ops.use_backend("triton"):
        eager = gradients(getattr(ops, op), arguments, contract.names, wanted)
        compiled = torch.compile(getattr(ops, op), fullgraph=True, backend="aot_eager", dynamic=dynamic)
        assert_close(gradients(compiled, arguments, contract.names, wanted), eager, 0.0)  # the same kernels


@pytest.mark.parametrize("op", EXAMPLES)
def test_float64_is_refused(device, op):
    arguments = placed(as_double(example(op)), device)
    with ops.use_backend("triton"), pytest.raises(ops.KernelUnavailableError, match=rf"{op}.*triton.*float64"):
        getattr(ops, op)(*arguments)


@pytest.mark.parametrize("op", EXAMPLES)
def test_float64_falls_back_with_one_log_line(device, op, caplog, monkeypatch):
    monkeypatch.setattr(registry, "_RESOLVED", {})  # resolve anew: this process may have resolved without the interpreter
    monkeypatch.setattr(registry, "_named_backend", None)
    monkeypatch.setattr(registry, "_logged", set())
    arguments = placed(as_double(example(op)), device)
    with caplog.at_level(logging.WARNING, logger=registry.logger.name):
        results = [getattr(ops, op)(*arguments) for _ in range(2)]
    assert [op in record.getMessage() and "float64" in record.getMessage() for record in caplog.records] == [True]
    expected = registry.contracts()[op].reference(*arguments)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
