"""Residual addition and RMSNorm in Triton: the kernels of rms_norm, which take the residual along."""

import torch

from liger_models.kernels.backends.triton import rms_norm


def refuses(x, residual, weight, eps, offset, scale_in_fp32):
    if x.shape != residual.shape:
        return f"x has shape {tuple(x.shape)}, residual {tuple(residual.shape)}"
    if residual.dtype == torch.float64:
        return "float64 input: the kernel computes in float32"
    return rms_norm.refuses(x, weight, eps, offset, scale_in_fp32)


def forward(needs, x, residual, weight, eps, offset, scale_in_fp32):
    normed, summed, rstd = rms_norm.normalise(x, residual, weight, eps, offset, scale_in_fp32)
    return (normed, summed), (rstd,)


def backward(needs, gradients, *, summed, weight, offset, scale_in_fp32, rstd):
    dnormed, dsummed = gradients
    wants_dx = needs.x or needs.residual
    if dnormed is None:
        # A copy: the caller's gradient may not come back as our own.
        dx, dweight = dsummed.clone() if wants_dx and dsummed is not None else None, None
    else:
        dx, dweight = rms_norm.input_gradients(
            dnormed, dsummed, summed, weight, offset, scale_in_fp32, rstd, wants_dx, needs.weight
        )
    # One tensor for both, as torch's own add returns it: autograd accumulates in place, or hands a gradient to a leaf without
    # a copy, only where it holds the sole reference. It also casts each to its argument's dtype where that is not the sum's.
    return dx if needs.x else None, dx if needs.residual else None, dweight
