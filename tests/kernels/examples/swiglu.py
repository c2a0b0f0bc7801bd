"""Example calls of swiglu."""

import torch


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    gate, up = torch.randn(2, 2, 3, 9, generator=torch.Generator().manual_seed(0))
    return gate, up


def calls():
    """Calls that together launch the kernels' variants, in the sizes of real models, for test_triton_targets.py."""
    for shape, dtype in [((4, 14336), torch.bfloat16), ((2, 8, 96), torch.float16), ((3, 5), torch.float32)]:
        gate, up = (torch.zeros(shape, dtype=dtype, requires_grad=True) for _ in range(2))
        yield gate, up
        yield gate, up.detach()
        yield gate.detach(), up
