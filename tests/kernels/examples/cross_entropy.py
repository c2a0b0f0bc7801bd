"""Example calls of cross_entropy."""

import torch


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 7, generator=generator), torch.tensor([2, -100, 6])


def calls():
    """Calls that together launch the kernels' variants, in the vocabulary of a real model, for test_triton_targets.py."""
    logits = torch.zeros(4, 128256, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(4, dtype=torch.int64)
    weight = torch.zeros(128256)
    yield logits, target
    yield logits, target, weight, -100, 1e-4, 0.1, "mean", 30.0, 0.5, None, True, True, True
    yield logits, target, None, -100, 0.0, 0.0, "none"
    yield torch.zeros(4, 33, requires_grad=True), target, None, -100, 0.0, 0.0, "sum"
