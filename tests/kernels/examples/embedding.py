"""Example calls of embedding."""

import torch


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 5, (2, 9), generator=generator), torch.randn(5, 6, generator=generator), 3


def calls():
    """Calls that together launch the kernels' variants, in the sizes of real models, for test_triton_targets.py."""
    for dtype, hidden in [(torch.bfloat16, 4096), (torch.float32, 10)]:
        yield torch.zeros(2, 8, dtype=torch.int64), torch.zeros(64, hidden, dtype=dtype, requires_grad=True)
    yield torch.zeros(2, 8, dtype=torch.int32), torch.zeros(64, 512, dtype=torch.float16, requires_grad=True), 0
