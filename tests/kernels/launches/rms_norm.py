"""Calls whose launches cover the variants of the kernels: see test_triton_targets.py."""

import torch


def calls():
    for shape, dtype in [((4, 4096), torch.bfloat16), ((2, 8, 128), torch.bfloat16), ((3, 5), torch.float32), ((2, 16384), torch.float16)]:
        x = torch.zeros(shape, dtype=dtype, requires_grad=True)
        yield x, torch.zeros(shape[-1], dtype=dtype, requires_grad=True), 1e-6
        yield x, torch.zeros(shape[-1], dtype=dtype), 1e-6, 1.0, True
    yield torch.zeros(4, 64, requires_grad=True), None
