"""`attn_implementation="liger"`: the kernel set's attention in transformers' attention interface.

It caps scores and has sinks, which scaled_dot_product_attention cannot, and skips what a window, padding or a document boundary
hides, where that would need a mask. A mask is not a matrix here but, for each query, the first and the last key that it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from liger_models import ops
from liger_models.layers.attention import eager_attention

NAME = "liger"

# How many pairs of query and key are looked at together where the intervals have to be read off a mask function.
_PAIRS = 2**26


class KeyIntervals(NamedTuple):
    """What queries see: see `kernels/attention.py`.

    Attributes:
        first_key, last_key: [batch or 1, queries], int32.
        key_mask: [batch, keys], bool, or None.
    """

    first_key: Tensor
    last_key: Tensor
    key_mask: Tensor | None = None

    def contiguous(self) -> KeyIntervals:
        """What generate asks of every mask that it has prepared."""
        mask = None if self.key_mask is None else self.key_mask.contiguous()
        return KeyIntervals(self.first_key.contiguous(), self.last_key.contiguous(), mask)

    def additive_mask(self, keys: int, dtype: torch.dtype) -> Tensor:
        """[batch or 1, 1, queries, keys]: 0 for pairs that see each other, the dtype's lowest number for the others."""
        key = torch.arange(keys, device=self.first_key.device)
        visible = (self.first_key.unsqueeze(-1) <= key) & (key <= self.last_key.unsqueeze(-1))
        if self.key_mask is not None:
            visible = visible & self.key_mask.unsqueeze(1)
        return torch.zeros((), dtype=dtype, device=key.device).masked_fill(~visible, torch.finfo(dtype).min).unsqueeze(1)


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: KeyIntervals | Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention by the kernel set's op; by plain matrix products for what it has not: its weights, dropout, a 4-D mask.

    Arguments and results as eager_attention's, and `s_aux`: [heads] sinks, under the name that the interface has for them.
    """
    wants_weights = output_attentions or getattr(module.config, "output_attentions", False)
    if isinstance(attention_mask, Tensor) or dropout or wants_weights:
        if isinstance(attention_mask, KeyIntervals):
            attention_mask = attention_mask.additive_mask(key.shape[2], query.dtype)
        return eager_attention(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux)
    if attention_mask is None:
        attention_mask = _all_keys(query.shape[2], key.shape[2], query.device)
    return ops.attention(query, key, value, *attention_mask, s_aux, scaling, softcap), None


def key_intervals(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> KeyIntervals:
    """The intervals of a mask, with the arguments that transformers gives its mask functions.

    Raises:
        RuntimeError: the keys that some query sees are no interval, as with a mask function of the caller's own.
    """
    if allow_is_causal_skip:  # transformers' word for: causal, and a window at most
        last = (torch.arange(q_length, device=device).unsqueeze(0) + (q_offset - kv_offset)).to(torch.int32)
        intervals = KeyIntervals(torch.zeros_like(last) if local_size is None else last - (local_size - 1), last)
    else:
        rows = max(1, _PAIRS // max(1, batch_size * kv_length))
        masks = (
            sdpa_mask(
                batch_size=batch_size,
                q_length=min(rows, q_length - start),
                kv_length=kv_length,
                q_offset=q_offset + start,
                kv_offset=kv_offset,
                mask_function=mask_function,
                allow_is_causal_skip=False,
                use_vmap=use_vmap,
                device=device,
            )
            for start in range(0, q_length, rows)
        )
        pieces = [_read_off(mask) for mask in masks if mask is not None]
        intervals = KeyIntervals(*(torch.cat(bounds, dim=1) for bounds in zip(*pieces)))
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    return intervals if padding is None else _padded(intervals, padding[:, kv_offset : kv_offset + kv_length])


def _read_off(mask: Tensor) -> tuple[Tensor, Tensor]:
    """First and last key of each row of a [batch, 1, queries, keys] mask; an empty interval for a row without a key."""
    keys = mask.shape[-1]
    key = torch.arange(keys, dtype=torch.int32, device=mask.device)
    first, last = torch.where(mask, key, keys).amin(-1), torch.where(mask, key, -1).amax(-1)
    gaps = (mask.sum(-1) != (last - first + 1).clamp(min=0)).any()
    torch._assert_async(~gaps, "attn_implementation='liger': a query sees keys with a gap between them; use 'eager' or 'sdpa'")
    return first.squeeze(1), last.squeeze(1)


def _padded(intervals: KeyIntervals, padding: Tensor) -> KeyIntervals:
    """Padding at the ends shortens the intervals, which costs nothing. Only holes need the mask, and while tracing, when
    nobody can look for them."""
    padding = padding.to(torch.bool)
    first, last = _ends(padding)
    if is_tracing(padding) or not bool((padding.sum(-1) == last - first + 1).all()):
        return intervals._replace(key_mask=padding)
    return KeyIntervals(
        torch.maximum(intervals.first_key, first.unsqueeze(1)), torch.minimum(intervals.last_key, last.unsqueeze(1))
    )


def _ends(padding: Tensor) -> tuple[Tensor, Tensor]:
    key = torch.arange(padding.shape[-1], dtype=torch.int32, device=padding.device)
    return torch.where(padding, key, padding.shape[-1]).amin(-1), torch.where(padding, key, -1).amax(-1)


def _all_keys(queries: int, keys: int, device: torch.device) -> KeyIntervals:
    first = torch.zeros(1, queries, dtype=torch.int32, device=device)
    return KeyIntervals(first, first + (keys - 1))


AttentionInterface.register(NAME, fused_attention)
AttentionMaskInterface.register(NAME, key_intervals)
