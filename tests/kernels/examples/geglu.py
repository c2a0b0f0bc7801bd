"""Example calls of geglu."""

import torch


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    gate, up = torch.randn(2, 2, 3, 9, generator=torch.Generator().manual_seed(0))
    return gate, up, "none"


def calls():
    """Calls that together launch the kernels' variants, in the sizes of real models, for test_triton_targets.py."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        gate, up = (torch.zeros(4, 9216, dtype=dtype, requires_grad=True) for _ in range(2))
        yield gate, up, "tanh"
        yield gate, up, "none"
