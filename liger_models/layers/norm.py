"""RMS normalisation."""

import torch
from torch import Tensor, nn

from liger_models import ops
from liger_models.layers.plain import is_plain


class LigerRMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension; see `kernels/rms_norm.py` for its rounding.

    Args:
        hidden_size: width of the last dimension.
        eps: added to the mean square.
        offset: added to the weight (1.0 in Gemma).
        scale_in_fp32: multiply by the weight before rounding to the input's dtype (Gemma), not after (Llama).
    """

    def __init__(self, hidden_size: int, *, eps: float, offset: float = 0.0, scale_in_fp32: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - offset))
        self.eps, self.offset, self.scale_in_fp32 = eps, offset, scale_in_fp32

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, self.eps, self.offset, self.scale_in_fp32)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, offset={self.offset}, scale_in_fp32={self.scale_in_fp32}"


def gemma_norm(hidden_size: int, *, eps: float) -> LigerRMSNorm:
    """Gemma's norm: the weight is stored less 1, and multiplied before the result is rounded."""
    return LigerRMSNorm(hidden_size, eps=eps, offset=1.0, scale_in_fp32=True)


def add_norm(norm: nn.Module, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The normalised sum of a residual and what is added to it, and the sum: one kernel where `norm` is plain."""
    if is_plain(norm, LigerRMSNorm):
        assert isinstance(norm, LigerRMSNorm)
        return ops.fused_add_rms_norm(hidden_states, residual, norm.weight, norm.eps, norm.offset, norm.scale_in_fp32)
    summed = residual + hidden_states
    return norm(summed), summed
