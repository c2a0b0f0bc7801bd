"""Example calls of rms_norm."""

import torch


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 8, generator=generator), torch.randn(8, generator=generator), 1e-6, 1.0, True


def calls():
    """Calls that together launch the kernels' variants, in the sizes of real models, for test_triton_targets.py."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for shape, dtype in [((4, 4096), bf16), ((2, 8, 128), bf16), ((3, 5), fp32), ((2, 16384), fp16)]:
        x = torch.zeros(shape, dtype=dtype, requires_grad=True)
        yield x, torch.zeros(shape[-1], dtype=dtype, requires_grad=True), 1e-6
        yield x, torch.zeros(shape[-1], dtype=dtype), 1e-6, 1.0, True
    yield torch.zeros(4, 64, requires_grad=True), None
