"""Example calls of qkv_rope."""

import torch


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(2, 3, 6, generator=generator)
    return torch.randn(2, 3, 6 * 10, generator=generator), angles.cos(), angles.sin(), 4, 1


def calls():
    """Calls that together launch the kernels' variants, in the sizes of real models, for test_triton_targets.py."""
    for head_dim, rotary_dim, interleaved in [(128, 128, False), (128, 64, True), (96, 96, False), (10, 4, False)]:
        qkv = torch.zeros(2, 16, (32 + 2 * 8) * head_dim, dtype=torch.bfloat16, requires_grad=True)
        angles = torch.zeros(1, 16, rotary_dim)
        yield qkv, angles, angles, 32, 8, interleaved
