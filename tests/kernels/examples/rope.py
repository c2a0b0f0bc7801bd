"""Example calls of rope."""

import torch


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, heads, 8, generator=generator).transpose(1, 2) for heads in (4, 2))
    angles = torch.randn(1, 3, 6, generator=generator)
    return q, k, angles.cos(), angles.sin()


def calls():
    """Calls that together launch the kernels' variants, in the sizes of real models, for test_triton_targets.py."""
    for head_dim, rotary_dim, interleaved, angle_dtype in [
        (128, 128, False, torch.float32), (128, 64, True, torch.bfloat16),
        (80, 80, False, torch.float32), (10, 4, True, torch.float32),
    ]:  # fmt: skip
        q, k = (
            torch.zeros(2, 16, heads, head_dim, dtype=torch.bfloat16, requires_grad=True).transpose(1, 2) for heads in (32, 8)
        )
        angles = torch.zeros(2, 16, rotary_dim, dtype=angle_dtype)
        yield q, k, angles, angles, interleaved
    yield q.float(), k.detach().float(), angles, angles


def every_length():
    """The same heads at 64 sequence lengths, in the layout of stock attention."""
    for length in range(1, 65):
        q, k = (torch.zeros(2, length, heads, 64, dtype=torch.bfloat16, requires_grad=True).transpose(1, 2) for heads in (8, 2))
        angles = torch.zeros(1, length, 64)
        yield q, k, angles, angles
