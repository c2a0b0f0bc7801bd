"""Example calls of gated_mlp."""

import torch


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 8), (20, 8), (6, 10), (20,), (6,)]
    return *(torch.randn(shape, generator=generator) for shape in shapes), "gelu_tanh"


def calls():
    """Calls that together launch the kernels' variants, on a slice of a real model's width, for test_triton_targets.py."""
    for activation in ("silu", "gelu", "gelu_tanh"):
        x, gate_up_weight, down_weight = (
            torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in [(4, 16), (256, 16), (16, 128)]
        )
        yield x, gate_up_weight, down_weight, None, None, activation
        yield x, gate_up_weight, down_weight.detach(), None, None, activation
