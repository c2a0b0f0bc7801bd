"""Example calls of fused_add_rms_norm."""

import torch


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 2, 3, 8, generator=generator)
    return x, residual, torch.randn(8, generator=generator)


def calls():
    """Calls that together launch the kernels' variants, in the sizes of real models, for test_triton_targets.py."""
    for x_dtype, residual_dtype in [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]:
        x = torch.zeros(4, 4096, dtype=x_dtype, requires_grad=True)
        residual = torch.zeros(4, 4096, dtype=residual_dtype, requires_grad=True)
        yield x, residual, torch.zeros(4096, dtype=x_dtype, requires_grad=True)
        yield x, residual, torch.zeros(4096, dtype=x_dtype), 1e-6, 1.0, True
