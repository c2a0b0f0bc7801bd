"""Rotary position embedding of a packed projection in Triton: the kernel of rope, from and to the packed layout."""

import torch

from liger_models.kernels.backends.triton.rope import move_heads, token_major, unsupported
from liger_models.kernels.qkv_rope import packed_misfit


def refuses(qkv, cos, sin, num_heads, num_key_value_heads, interleaved):
    reason = packed_misfit(qkv, cos, sin, num_heads, num_key_value_heads)
    return reason or unsupported(qkv.shape[-1] // (num_heads + 2 * num_key_value_heads), qkv, cos, sin)


def forward(needs, qkv, cos, sin, num_heads, num_key_value_heads, interleaved):
    heads = (num_heads, num_key_value_heads, num_key_value_heads)
    batch, sequence, width = qkv.shape
    head_dim = width // sum(heads)
    targets = tuple(token_major((batch, count, sequence, head_dim), qkv) for count in heads)
    move_heads(
        _parts(qkv, heads, head_dim),
        targets,
        heads,
        [count * head_dim for count in heads],
        head_dim,
        cos,
        sin,
        interleaved,
        False,
    )
    return targets, ()


def backward(needs, gradients, *, cos, sin, num_heads, num_key_value_heads, interleaved):
    heads = (num_heads, num_key_value_heads, num_key_value_heads)
    given = next((gradient for gradient in gradients if gradient is not None), None)
    if given is None:
        return (None,)
    batch, _, sequence, head_dim = given.shape
    width = sum(heads) * head_dim
    dqkv = torch.empty(batch, sequence, width, dtype=given.dtype, device=given.device)
    move_heads(gradients, _parts(dqkv, heads, head_dim), heads, [width] * 3, head_dim, cos, sin, interleaved, True)
    return (dqkv,)


def _parts(packed, heads, head_dim):
    """Queries, keys and values of a packed tensor as [batch, heads, sequence, head_dim] views."""
    views, start = [], packed.storage_offset()
    batch, sequence, last = packed.stride()
    for count in heads:
        shape = (packed.shape[0], count, packed.shape[1], head_dim)
        views.append(packed.as_strided(shape, (batch, head_dim * last, sequence, last), start))
        start += count * head_dim * last
    return views
