"""Attention over an interval of keys per query, with sinks, a soft cap and grouped key-value heads."""

import torch
from torch import Tensor

from liger_models.kernels.registry import contract


@contract(differentiable=("q", "k", "v", "sinks"), autocast=("q", "k", "v"))
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_key: Tensor,
    last_key: Tensor,
    key_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    scaling: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Softmax over the visible keys of scores scaling·q·k, or softcap·tanh(scaling·q·k / softcap), times the values.

    Query i sees key j if first_key[i] <= j <= last_key[i] and, with a key mask, key_mask[j]. A sink is one more score per
    head, uncapped, that every query sees and that has no value: it takes part in the softmax and adds nothing to the output.
    All of it in fp32 (fp64 for fp64 input); an implementation may round the weights, and their gradients, to the dtype of
    `q` before it multiplies by values, keys and queries. A query that sees no key has a zero output and zero gradients.

    The intervals express the usual masks, for query i at position p of its sequence:

        causal                    last_key = p, which is i plus the number of cached keys; first_key = 0
        window of w keys          first_key = p - w + 1
        packed documents          first_key = first key of the document of i
        left or right padding     first_key = number of padded keys; last_key at most the last key that is none

    Bounds beyond the keys are allowed: first_key may be negative, last_key may pass the last key. In all these masks both are
    non-decreasing along a row. Nothing depends on it but speed: blocks of keys that no query of a block sees are skipped.

    Args:
        q: [batch, heads, queries, head_dim], floating point, any strides.
        k, v: [batch, key_value_heads, keys, head_dim], any strides, in the dtype of `q`; heads is a multiple of
            key_value_heads, and query head h reads key-value head h // (heads / key_value_heads).
        first_key, last_key: [batch or 1, queries], int32: the first and the last key that a query sees.
        key_mask: [batch, keys], bool or uint8: nonzero for keys that may be seen at all; or None for all of them.
        sinks: [heads], floating point, or None.
        scaling: factor of q·k, positive.
        softcap: bound of the scores, positive, or None for no bound.

    Returns:
        [batch, queries, heads, head_dim], contiguous, in the dtype of `q`: transformers' attention interface.

    Differentiable in `q`, `k`, `v` and `sinks`. An implementation keeps the arguments, the output and one fp32 number per
    query and head for backward, never the scores.

    Raises:
        ValueError: shapes or dtypes do not fit, or a factor is not positive.

    Source: Vaswani et al. 2017, arXiv:1706.03762; grouped heads Ainslie et al. 2023, arXiv:2305.13245; sinks Xiao et al.
    2023, arXiv:2309.17453, as learned by GPT-OSS; soft cap Gemma 2, arXiv:2408.00118. Equals eager_attention_forward of
    transformers' Llama, GPT-OSS and Gemma 2 where a query sees a key; those give the mean of all values (with sinks: of some)
    where it sees none.
    """
    reason = misfit(q, k, v, first_key, last_key, key_mask, sinks, scaling, softcap)
    if reason is not None:
        raise ValueError(f"attention: {reason}")
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    key_value_heads = k.shape[1]
    grouped = q.to(compute).unflatten(1, (key_value_heads, q.shape[1] // key_value_heads))
    scores = torch.matmul(grouped, k.to(compute).transpose(2, 3).unsqueeze(2)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = _weights(scores, _visible(first_key, last_key, key_mask, k.shape[2])[:, None, None], sinks)
    output = torch.matmul(weights, v.to(compute).unsqueeze(2)).flatten(1, 2)
    return output.transpose(1, 2).to(q.dtype).contiguous()


def _visible(first_key: Tensor, last_key: Tensor, key_mask: Tensor | None, keys: int) -> Tensor:
    """[batch or 1, queries, keys]: whether a query sees a key."""
    key = torch.arange(keys, dtype=torch.int32, device=first_key.device)
    visible = (first_key.unsqueeze(-1) <= key) & (key <= last_key.unsqueeze(-1))
    return visible if key_mask is None else visible & key_mask.to(torch.bool).unsqueeze(1)


def _weights(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention weights of [batch, key_value_heads, group, queries, keys] scores.

    The lowest number, not -inf, stands in for what is not seen: a row of -inf would be NaN, and its gradient too.
    """
    keys = scores.shape[-1]
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1, 1)
        scores = torch.cat((scores, column.expand(*scores.shape[:-1], 1)), -1)
    return torch.softmax(scores, -1)[..., :keys].masked_fill(~visible, 0.0)


def misfit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_key: Tensor,
    last_key: Tensor,
    key_mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> str | None:
    """What is wrong with the arguments, and what they should be; None if nothing is."""
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        return (
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; they must be [batch, heads, queries, "
            "head_dim] and, k and v alike, [batch, key_value_heads, keys, head_dim]"
        )
    batch, heads, queries, head_dim = q.shape
    if k.shape[0] != batch or k.shape[3] != head_dim or k.shape[1] == 0 or heads % k.shape[1]:
        return (
            f"q has shape {tuple(q.shape)}, k and v {tuple(k.shape)}; they must agree in batch and head_dim, and the number "
            "of query heads must be a multiple of that of key-value heads"
        )
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; cast them to one dtype before the call"
    return _interval_misfit(first_key, last_key, batch, queries) or _option_misfit(
        key_mask, sinks, scaling, softcap, batch, heads, k.shape[2]
    )


def _interval_misfit(first_key: Tensor, last_key: Tensor, batch: int, queries: int) -> str | None:
    for name, bound in (("first_key", first_key), ("last_key", last_key)):
        if bound.dim() != 2 or bound.shape[0] not in (1, batch) or bound.shape[1] != queries or bound.dtype != torch.int32:
            return f"{name} is {bound.dtype} {tuple(bound.shape)}; for these queries it must be int32 [{batch} or 1, {queries}]"
    if first_key.shape != last_key.shape:
        return f"first_key has shape {tuple(first_key.shape)}, last_key {tuple(last_key.shape)}; expand one to the other's"
    return None


def _option_misfit(
    key_mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float | None,
    batch: int,
    heads: int,
    keys: int,
) -> str | None:
    if key_mask is not None and (key_mask.shape != (batch, keys) or key_mask.dtype not in (torch.bool, torch.uint8)):
        return f"key_mask is {key_mask.dtype} {tuple(key_mask.shape)}; it must be bool or uint8 [{batch}, {keys}]"
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_floating_point()):
        return f"sinks is {sinks.dtype} {tuple(sinks.shape)}; it must be floating point [{heads}], one per query head"
    if not scaling > 0.0:
        return f"scaling is {scaling}; it must be positive (a factor of zero or below belongs into q)"
    if softcap is not None and not softcap > 0.0:
        return f"softcap is {softcap}; it must be positive, or None for scores without a bound"
    return None
