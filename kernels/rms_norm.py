"""Root mean square layer normalisation."""

import torch
from torch import Tensor

from liger_models.kernels.registry import contract


@contract(differentiable=("x", "weight"))
def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0, scale_in_fp32: bool = False) -> Tensor:
    """Scale the last dimension of `x` to unit root mean square, then by `offset + weight`.

    Statistics are computed in fp32 (fp64 for fp64 input) for every input dtype. The normalised value is rounded to the dtype
    of `x` before it is multiplied by the weight (as in Llama), or, with `scale_in_fp32`, the product is formed in fp32 and
    rounded once (as in Gemma, with `offset=1.0`).

    Args:
        x: [..., hidden], floating point.
        weight: [hidden], or None for no scale.
        eps: added to the mean square.
        offset: added to the weight (in fp32 with `scale_in_fp32`, else in the weight's dtype).
        scale_in_fp32: multiply before rounding to the dtype of `x`.

    Returns:
        [..., hidden] in the dtype of `x` (promoted with the weight's dtype unless `scale_in_fp32`, as stock Llama does).

    Differentiable in `x` and `weight`. Source: Zhang and Sennrich 2019, arXiv:1910.07467; equals LlamaRMSNorm and
    Gemma2RMSNorm of transformers.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    normalised = x.to(compute)
    normalised = normalised * torch.rsqrt(normalised.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normalised.to(x.dtype)
    if scale_in_fp32:
        return (normalised * (offset + weight.to(compute))).to(x.dtype)
    return (weight if offset == 0.0 else offset + weight) * normalised.to(x.dtype)
