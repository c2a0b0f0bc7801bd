"""Single ops on this device: forward and backward together, on the backends side by side."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_models import ops
from liger_models.cli.environment import device_type
from liger_models.cli.output import CommandError, print_table

_WARM_UP, _REPEATS = 3, 20
_BYTES = 2  # of a bfloat16


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer of a model, and of the tokens that it sees at once."""

    batch: int
    length: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    key_value_heads: int
    head_dim: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length


SHAPES = {
    "tiny": Shape(2, 64, 128, 256, 512, 4, 2, 32),
    "1b": Shape(4, 2048, 2048, 8192, 128256, 32, 8, 64),
    "8b": Shape(4, 2048, 4096, 14336, 128256, 32, 8, 128),
}


def bench(names: list[str], backends: list[str], shape_name: str | None, device: str | None) -> None:
    """Print a row for each op and backend.

    Args:
        names: of ops; none means all.
        backends: none means the torch reference and what the ops resolve to.
        shape_name: a key of SHAPES, or None for one that suits the device.

    Raises:
        CommandError: an op, a shape or a device that does not exist.
        KernelUnavailableError: a backend that does not exist or that cannot serve an op on this device.
    """
    device = device_type(device)
    shape_name = shape_name or ("tiny" if device == "cpu" else "8b")
    for option, given, known in (("--op", names, CASES), ("--shape", [shape_name], SHAPES)):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise CommandError(f"{option} {', '.join(unknown)}: there is none of this name; there are {', '.join(known)}")
    if device != "cpu" and device != ops.infer_device():
        raise CommandError(f"--device {device}: torch finds no such device here; it finds {ops.infer_device()}")
    rows = [
        row(name, backend, SHAPES[shape_name], device)
        for name in names or CASES
        for backend in backends or dict.fromkeys(("torch", ops.resolve(device).choices[name].backend))
    ]
    print(f"{device}, sizes {shape_name}, bfloat16, forward and backward, median of {_REPEATS} calls with their launches;")
    print("GB/s: the least bytes that the op has to move over its time")
    print_table(("op", "backend", "ms", "GB/s"), rows, right=("ms", "GB/s"))


def row(name: str, backend: str, shape: Shape, device: str) -> tuple[str, str, str, str]:
    """(op, backend, milliseconds, gigabytes in a second), measured."""
    torch.manual_seed(0)
    arguments, moved = CASES[name](shape, device)
    with ops.use_backend(backend):
        spent = milliseconds(_step(getattr(ops, name), arguments), device)
    return name, backend, f"{spent:.4f}", f"{moved / spent / 1e6:.1f}"


def _step(op: Callable, arguments: dict[str, Any]) -> Callable[[], object]:
    """Forward and backward of an op, with random gradients of its outputs."""
    leaves = [value for value in arguments.values() if isinstance(value, Tensor) and value.requires_grad]
    gradients = [torch.randn_like(output) if output.ndim else None for output in _outputs(op, arguments)]
    return lambda: torch.autograd.grad(_outputs(op, arguments), leaves, gradients)


def _outputs(op: Callable, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    outputs = op(**arguments)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def milliseconds(function: Callable, device: str) -> float:
    """Median time of a call: by events on a CUDA device, by the host's clock around a synchronisation elsewhere."""
    for _ in range(_WARM_UP):
        function()
    timed = _by_events if device == "cuda" else _by_clock
    return statistics.median(timed(function, device) for _ in range(_REPEATS))


def _by_events(function: Callable, _device: str) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _by_clock(function: Callable, device: str) -> float:
    started = time.perf_counter()
    function()
    if device != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - started) * 1000


# ---------------------------------------------------------------------------------------------------------------------
# The ops: arguments, and the least bytes of forward and backward together: each tensor in or out once per pass


def _data(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16).requires_grad_()


def _rms_norm(shape: Shape, device: str) -> tuple[dict[str, Any], int]:
    x = _data(shape.tokens, shape.hidden, device=device)
    return {"x": x, "weight": _data(shape.hidden, device=device), "eps": 1e-6}, 5 * x.numel() * _BYTES


def _fused_add_rms_norm(shape: Shape, device: str) -> tuple[dict[str, Any], int]:
    x, residual = (_data(shape.tokens, shape.hidden, device=device) for _ in range(2))
    arguments = {"x": x, "residual": residual, "weight": _data(shape.hidden, device=device), "eps": 1e-6}
    return arguments, 8 * x.numel() * _BYTES


def _rope(shape: Shape, device: str) -> tuple[dict[str, Any], int]:
    q, k = (
        _data(shape.batch, shape.length, heads, shape.head_dim, device=device).detach().transpose(1, 2).requires_grad_()
        for heads in (shape.heads, shape.key_value_heads)
    )
    angles = torch.rand(1, shape.length, shape.head_dim // 2, device=device).repeat(1, 1, 2)
    return {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()}, 4 * (q.numel() + k.numel()) * _BYTES


def _gated(shape: Shape, device: str) -> tuple[dict[str, Any], int]:
    gate, up = (_data(shape.tokens, shape.intermediate, device=device) for _ in range(2))
    return {"gate": gate, "up": up}, 8 * gate.numel() * _BYTES


def _cross_entropy(shape: Shape, device: str) -> tuple[dict[str, Any], int]:
    logits = _data(shape.tokens, shape.vocabulary, device=device)
    target = torch.randint(shape.vocabulary, (shape.tokens,), device=device)
    return {"logits": logits, "target": target}, 2 * logits.numel() * _BYTES


def _embedding(shape: Shape, device: str) -> tuple[dict[str, Any], int]:
    indices = torch.randint(shape.vocabulary, (shape.batch, shape.length), device=device)
    weight = _data(shape.vocabulary, shape.hidden, device=device)
    return {"indices": indices, "weight": weight}, (3 * shape.tokens * shape.hidden + weight.numel()) * _BYTES


CASES: dict[str, Callable[[Shape, str], tuple[dict[str, Any], int]]] = {
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "rope": _rope,
    "swiglu": _gated,
    "geglu": _gated,
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
}
