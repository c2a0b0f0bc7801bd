"""Example calls of qk_norm_rope."""

import torch


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(2, 3, 6, generator=generator)
    q_weight, k_weight = 1 + 0.3 * torch.randn(2, 10, generator=generator)
    return torch.randn(2, 3, 6 * 10, generator=generator), q_weight, k_weight, angles.cos(), angles.sin(), 4, 1


def calls():
    """Calls that together launch the kernels' variants, in the sizes of real models, for test_triton_targets.py."""
    for head_dim, rotary_dim, gemma, interleaved in [
        (128, 128, False, False),
        (256, 256, True, False),
        (128, 64, False, True),
        (96, 32, True, False),
    ]:
        qkv = torch.zeros(2, 16, (32 + 2 * 8) * head_dim, dtype=torch.bfloat16, requires_grad=True)
        q_weight, k_weight = (torch.zeros(head_dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        angles = torch.zeros(1, 16, rotary_dim)
        yield qkv, q_weight, k_weight, angles, angles, 32, 8, 1e-6, float(gemma), gemma, interleaved
