"""Launching Triton kernels: on the tensor's device, and not at all while a graph is being traced."""

import functools

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def launch(kernel, grid, *arguments, **options) -> None:
    """`kernel[grid](*arguments, **options)` on the device of the first argument, which is a tensor.

    Fake tensors (torch.compile tracing an op's shapes) and meta tensors launch nothing: allocation has happened already.
    A grid with a zero launches nothing either. `grid` is a tuple, or a function without arguments that returns one.
    """
    tensor: Tensor = arguments[0]
    if is_traced(tensor):
        return
    grid = grid() if callable(grid) else grid
    if 0 in grid:
        return
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        with torch.cuda.device(tensor.device):
            kernel[grid](*arguments, **options)
    else:
        kernel[grid](*arguments, **options)


def is_traced(tensor: Tensor) -> bool:
    """Whether a tensor has a shape only: an op returns after its allocations then."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor as [rows, last dimension] with a last stride of 1; a copy only where the layout has no such view."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side on a device: partial sums are kept per program."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    return 1


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of on-chip memory that the programs on one multiprocessor share: what loads in flight may occupy."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return 65536  # what every supported device has at least


def next_power_of_2(n: int) -> int:
    """The block size for n elements. A symbolic size becomes a number here: blocks are compile-time constants."""
    return triton.next_power_of_2(int(n))
