"""Rotary position embedding of a packed query, key and value projection."""

import torch
from torch import Tensor

from liger_models.kernels.registry import contract
from liger_models.kernels.rope import angles_misfit, rotated


@contract(differentiable=("qkv",), outputs=("q", "k", "v"))
def qkv_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_key_value_heads: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection's output into heads, rotate the queries and keys as rope does, and copy the values.

    Args:
        qkv: [batch, sequence, (num_heads + 2 * num_key_value_heads) * head_dim]: queries, then keys, then values.
        cos, sin: [batch or 1, sequence, rotary_dim], as in rope.
        num_heads: query heads.
        num_key_value_heads: key heads, and as many value heads.
        interleaved: as in rope.

    Returns:
        q: [batch, num_heads, sequence, head_dim],
        k, v: [batch, num_key_value_heads, sequence, head_dim], in the dtype of `qkv`, each the transposed view of a
        contiguous [batch, sequence, heads, head_dim] tensor of its own: what scaled_dot_product_attention takes uncopied.

    Differentiable in `qkv`; each output may stay out of the loss. An implementation keeps only cos and sin for backward.

    Raises:
        ValueError: the width of `qkv` is no multiple of the number of heads, or cos and sin do not fit.

    Source: as rope.
    """
    reason = packed_misfit(qkv, cos, sin, num_heads, num_key_value_heads)
    if reason is not None:
        raise ValueError(f"qkv_rope: {reason}")
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_key_value_heads)
    q, k, v = (
        part.unflatten(-1, (heads, head_dim)).transpose(1, 2)
        for part, heads in zip(
            qkv.split([num_heads * head_dim, num_key_value_heads * head_dim, num_key_value_heads * head_dim], -1),
            (num_heads, num_key_value_heads, num_key_value_heads),
        )
    )
    q, k = rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)
    return token_major_copy(q), token_major_copy(k), token_major_copy(v)


def packed_misfit(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_key_value_heads: int) -> str | None:
    """What is wrong with the shapes, and what they should be; None if nothing is."""
    heads = num_heads + 2 * num_key_value_heads
    if qkv.dim() != 3 or qkv.shape[2] % heads:
        return (
            f"qkv has shape {tuple(qkv.shape)}; with {num_heads} query and {num_key_value_heads} key-value heads it must be "
            f"[batch, sequence, {heads} * head_dim]"
        )
    return angles_misfit(cos, sin, qkv.shape[0], qkv.shape[1], qkv.shape[2] // heads)


def token_major_copy(x: Tensor) -> Tensor:
    """A copy of [batch, heads, sequence, head_dim] that is contiguous as [batch, sequence, heads, head_dim]."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
