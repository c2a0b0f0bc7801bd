"""Residual addition followed by root mean square layer normalisation."""

import torch
from torch import Tensor

from liger_models.kernels.registry import contract
from liger_models.kernels.rms_norm import rms_norm


@contract(differentiable=("x", "residual", "weight"), outputs=("normed", "summed"))
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0, scale_in_fp32: bool = False
) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream, and normalise the sum: `summed = x + residual`, `normed = rms_norm(summed, ...)`.

    The sum is rounded to its dtype before it is normalised, as when the two steps are separate.

    Args:
        x: [..., hidden], floating point: what a layer adds to the stream.
        residual: [..., hidden], the shape of `x`; its dtype may differ (under autocast the stream can be fp32).
        weight: [hidden], or None for no scale.
        eps, offset, scale_in_fp32: as in rms_norm.

    Returns:
        normed: [..., hidden] in the dtype that rms_norm gives for `summed`.
        summed: [..., hidden] in the promoted dtype of `x` and `residual`.

    Differentiable in `x`, `residual` and `weight`; either output may stay out of the loss. An implementation keeps `summed`
    for backward, and neither `x` nor `residual`.

    Raises:
        ValueError: `x` and `residual` differ in shape.

    Source: the pre-norm residual block of Llama (Touvron et al. 2023, arXiv:2302.13971) with the next block's norm.
    """
    if x.shape != residual.shape:
        raise ValueError(
            f"fused_add_rms_norm: x has shape {tuple(x.shape)}, residual {tuple(residual.shape)}; give both one shape"
        )
    summed = torch.add(x, residual)
    return rms_norm(summed, weight, eps, offset, scale_in_fp32), summed
