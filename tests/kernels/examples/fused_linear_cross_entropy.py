"""Example calls of fused_linear_cross_entropy."""

import torch


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 5, generator=generator), torch.randn(7, 5, generator=generator)
    return hidden, weight, torch.tensor([2, -100, 6])


def calls():
    """Calls that together launch the kernels' variants, for test_triton_targets.py."""
    hidden = torch.zeros(4, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(128256, 16, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(4, dtype=torch.int64)
    yield hidden, weight, target
    yield hidden, weight, target, None, None, -100, 0.0, 0.0, "none"
    yield hidden, weight, target, None, torch.zeros(128256), -100, 1e-4, 0.1, "mean", 30.0, 0.5
