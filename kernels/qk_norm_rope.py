"""RMS norm of queries and keys and rotary position embedding of a packed query, key and value projection."""

from torch import Tensor

from liger_models.kernels.qkv_rope import packed_misfit, token_major_copy
from liger_models.kernels.registry import contract
from liger_models.kernels.rms_norm import rms_norm
from liger_models.kernels.rope import rotated


@contract(differentiable=("qkv", "q_weight", "k_weight"), outputs=("q", "k", "v"))
def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_key_value_heads: int,
    eps: float = 1e-6,
    offset: float = 0.0,
    scale_in_fp32: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection's output into heads, normalise queries and keys as rms_norm does and rotate them as rope does.

    The norm goes over head_dim; its result is rounded as rms_norm's, then rotated in fp32 and rounded once more. Values are
    copied.

    Args:
        qkv: [batch, sequence, (num_heads + 2 * num_key_value_heads) * head_dim]: queries, then keys, then values.
        q_weight, k_weight: [head_dim], of one dtype.
        cos, sin: [batch or 1, sequence, rotary_dim], as in rope.
        num_heads: query heads.
        num_key_value_heads: key heads, and as many value heads.
        eps, offset, scale_in_fp32: as in rms_norm.
        interleaved: as in rope.

    Returns:
        q: [batch, num_heads, sequence, head_dim], k, v: [batch, num_key_value_heads, sequence, head_dim], in memory as
        qkv_rope's; q and k in the dtype that rms_norm gives, v in that of `qkv`.

    Differentiable in `qkv`, `q_weight` and `k_weight`; each output may stay out of the loss. An implementation keeps its
    arguments and nothing else for backward.

    Raises:
        ValueError: the width of `qkv` is no multiple of the number of heads, or weights, cos or sin do not fit.

    Source: Henry et al. 2020, arXiv:2010.04245, in the form of transformers' Qwen3Attention and Gemma3Attention.
    """
    reason = misfit(qkv, q_weight, k_weight, cos, sin, num_heads, num_key_value_heads)
    if reason is not None:
        raise ValueError(f"qk_norm_rope: {reason}")
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_key_value_heads)
    counts = (num_heads, num_key_value_heads, num_key_value_heads)
    q, k, v = (
        part.unflatten(-1, (count, head_dim)).transpose(1, 2)
        for part, count in zip(qkv.split([count * head_dim for count in counts], -1), counts)
    )
    q, k = (
        rotated(rms_norm(heads, weight, eps, offset, scale_in_fp32), cos, sin, interleaved)
        for heads, weight in ((q, q_weight), (k, k_weight))
    )
    return token_major_copy(q), token_major_copy(k), token_major_copy(v)


def misfit(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_key_value_heads: int
) -> str | None:
    """What is wrong with the shapes, and what they should be; None if nothing is."""
    reason = packed_misfit(qkv, cos, sin, num_heads, num_key_value_heads)
    if reason is not None:
        return reason
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_key_value_heads)
    if q_weight.shape != (head_dim,) or k_weight.shape != (head_dim,) or q_weight.dtype != k_weight.dtype:
        return (
            f"q_weight has shape {tuple(q_weight.shape)} and {q_weight.dtype}, k_weight {tuple(k_weight.shape)} and "
            f"{k_weight.dtype}; both must be [{head_dim}] in one dtype"
        )
    return None
