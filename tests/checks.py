"""How a backend's implementation of an op is checked: every output and every gradient, by name, against fp64."""

from collections.abc import Callable, Sequence

import torch

from liger_models import ops
from liger_models.kernels.registry import Contract, contracts

# The spacing of numbers next to 1. An output that an op rounds once is right to half of this times its size.
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def gradients(function: Callable, arguments: Sequence, names: Sequence[str], wanted: Sequence[str], seed: int = 0) -> dict:
    """Outputs and gradients of a function, by name, for random output gradients that depend on `seed` alone."""
    arguments = [
        copy(a).requires_grad_(name in wanted) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for name, a in zip(names, arguments)
    ]
    outputs = function(*arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    result = {f"output {index}": output.detach() for index, output in enumerate(outputs) if output is not None}
    generator = torch.Generator().manual_seed(seed)
    given = [o for o in outputs if o is not None]
    # Drawn for every output: an autograd Function calls all its outputs differentiable, where the reference may not.
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device, o.dtype) for o in given]
    differentiable = [(o, weight) for o, weight in zip(given, weights) if o.requires_grad]
    if differentiable:
        torch.autograd.backward(*zip(*differentiable))
    for name, argument in zip(names, arguments):
        if isinstance(argument, torch.Tensor) and argument.is_floating_point():
            if name in wanted:
                assert argument.grad is not None, f"no gradient for {name}"
                result[f"gradient of {name}"] = argument.grad
            else:
                assert argument.grad is None, f"a gradient for {name}, which does not require one"
    return result


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the values and the strides of a tensor: `clone` would make a strided slice dense."""
    if 0 in tensor.stride() or tensor.numel() == 0:  # expanded: its elements share memory and cannot be leaves
        return tensor.detach().clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def assert_close(actual: dict, expected: dict, tolerance: float) -> None:
    """Each tensor of `actual` is within `tolerance`, relative to the largest element, of its namesake in `expected`."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        reference = expected[name]
        assert tensor.shape == reference.shape, f"{name}: shape {tuple(tensor.shape)}, not {tuple(reference.shape)}"
        if tensor.numel() == 0:
            continue
        assert torch.isfinite(tensor).all() or not torch.isfinite(reference).all(), f"{name}: not finite"
        scale = max(reference.abs().max().item(), 1e-6)
        error = (tensor.double() - reference.double()).abs().max().item() / scale
        assert error <= tolerance, f"{name}: relative error {error:.3g} above {tolerance:.3g}"


def check_op(
    op: str, *arguments, backend: str, tolerance: float, wanted: Sequence[str] | None = None, device: str = "cpu", **options
) -> None:
    """Run an op on a backend and compare its outputs and gradients with the reference in fp64.

    Args:
        op: the op's name.
        arguments, options: as the op takes them; floating-point tensors are the values in the dtype under test.
        backend: the backend under test.
        tolerance: largest allowed error, relative to each tensor's largest element.
        wanted: the arguments that require gradients; all differentiable ones that are given unless said otherwise.
        device: where to run.
    """
    contract: Contract = contracts()[op]
    values = contract.arguments(arguments, dict(options))
    given = [n for n, v in zip(contract.names, values) if n in contract.differentiable and v is not None]
    wanted = given if wanted is None else wanted
    exact = [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]
    expected = gradients(contract.reference, exact, contract.names, wanted)
    placed = [to_device(v, device) if isinstance(v, torch.Tensor) else v for v in values]
    with ops.use_backend(backend):
        actual = gradients(getattr(ops, op), placed, contract.names, wanted)
    assert_close({name: tensor.cpu() for name, tensor in actual.items()}, expected, tolerance)


def to_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on a device with its strides kept: layouts are part of what is tested."""
    if device == "cpu":
        return tensor
    if 0 in tensor.stride() and tensor.numel():  # expanded: one element is moved, and expanded there
        first = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
        return first.to(device).expand(tensor.shape)
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor) if tensor.numel() else moved
