"""Rotary position embedding of separate queries and keys."""

import torch
from torch import Tensor

from liger_models.kernels.registry import contract


@contract(differentiable=("q", "k"), outputs=("rotated_q", "rotated_k"))
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate pairs of the first `rotary_dim` elements of every query and key head; the elements behind them pass through.

    Pair i is the elements (i, i + rotary_dim / 2), or (2i, 2i + 1) with `interleaved`. It turns by the angle whose cosine and
    sine are `cos[..., i]` and `sin[..., i]`; the second half of cos and sin, which repeats the first, is not read. Products
    and sums are formed in fp32 (fp64 for fp64 input) whatever the dtypes, and rounded once.

    Args:
        q: [batch, query_heads, sequence, head_dim], any strides.
        k: [batch, key_value_heads, sequence, head_dim], any strides.
        cos, sin: [batch or 1, sequence, rotary_dim], rotary_dim even and at most head_dim; they may be fp32 where q and
            k are not.
        interleaved: pairs of neighbours.

    Returns:
        (q, k) rotated, in the shapes and dtypes of `q` and `k`.

    Differentiable in `q` and `k` only.

    Raises:
        ValueError: the shapes of q, k, cos and sin do not fit each other.

    Source: Su et al. 2021, arXiv:2104.09864; equal in fp32 to apply_rotary_pos_emb of transformers' Llama, `interleaved` to
    that of its GLM.
    """
    reason = misfit(q, k, cos, sin)
    if reason is not None:
        raise ValueError(f"rope: {reason}")
    return rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)


def misfit(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """What is wrong with the shapes, and what they should be; None if nothing is."""
    batch, _, sequence, head_dim = q.shape
    if (k.shape[0], k.shape[2], k.shape[3]) != (batch, sequence, head_dim):
        return f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}; they may differ in the number of heads only"
    return angles_misfit(cos, sin, batch, sequence, head_dim)


def angles_misfit(cos: Tensor, sin: Tensor, batch: int, sequence: int, head_dim: int) -> str | None:
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != sequence:
        return (
            f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}; for this input both must be "
            f"[{batch} or 1, {sequence}, rotary_dim]"
        )
    if cos.shape[2] % 2 or cos.shape[2] > head_dim:
        return f"rotary_dim (the last dimension of cos) is {cos.shape[2]}; it must be even and at most head_dim, {head_dim}"
    return None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotation of one [batch, heads, sequence, head_dim] tensor: see rope."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    rotary_dim, half = cos.shape[-1], cos.shape[-1] // 2
    cos, sin = (angle[:, None, :, :half].to(compute) for angle in (cos, sin))
    turning, rest = x[..., :rotary_dim].to(compute), x[..., rotary_dim:]
    first, second = (
        (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.split(half, -1) if half else (turning,) * 2
    )
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((joined.to(x.dtype), rest), -1)
