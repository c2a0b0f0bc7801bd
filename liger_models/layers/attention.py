"""Multi-head attention with grouped key-value heads and rotary positions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_models import ops
from liger_models.layers.head import softcapped
from liger_models.layers.linear import PackedLinear, attach_parts, runs_packed
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.plain import is_plain


class LigerAttention(nn.Module):
    """softmax(q k^T / scale) v over rotated queries and keys, with q, k and v packed into `qkv_proj`.

    The product itself is done by the attention function that the model passes in: transformers' attention interface,
    which reads `layer_index`, `num_key_value_groups`, `is_causal` and `config` off this module.

    Args:
        hidden_size: width of input and output.
        num_heads, num_key_value_heads: query heads, and key-value heads that groups of them share.
        head_dim: width of a head.
        layer_index: position of the block, under which the cache files its keys and values.
        scaling: factor on q k^T.
        dropout: probability of dropping an attention weight in training.
        bias, output_bias: whether q, k, v and o have biases.
        query_norm, key_norm: LigerRMSNorm, of equal numbers, over head_dim of every query and key head before the rotation; or
            None.
        interleaved: rotate pairs of neighbours (see `kernels/rope.py`).
        sliding_window: how many keys up to its own a query attends to. For attention functions that take no mask; the mask
            that the model passes holds it already.
        softcap: cap of the scores, cap * tanh(scores / cap), or None.
        is_causal: whether an attention function that gets no mask has to be causal.
        sinks: whether each query head has a learned score without a value, which takes its share of the softmax.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        layer_index: int,
        scaling: float,
        dropout: float = 0.0,
        bias: bool = False,
        output_bias: bool = False,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        interleaved: bool = False,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool = True,
        sinks: bool = False,
    ):
        super().__init__()
        self.layer_idx, self.num_key_value_groups = layer_index, num_heads // num_key_value_heads  # names of the interface
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, num_key_value_heads, head_dim
        self.scaling, self.dropout, self.interleaved = scaling, dropout, interleaved
        self.sliding_window, self.softcap, self.is_causal = sliding_window, softcap, is_causal
        widths = {"q_proj": num_heads, "k_proj": num_key_value_heads, "v_proj": num_key_value_heads}
        self.qkv_proj = PackedLinear(hidden_size, {name: n * head_dim for name, n in widths.items()}, bias=bias)
        attach_parts(self, "qkv_proj")
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=output_bias)
        self.q_norm, self.k_norm = query_norm, key_norm
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        attention_function: Callable,
        cache: Any = None,
        update_cache: Callable | None = None,
        **context: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[batch, sequence, hidden] -> the same, and the attention weights where the attention function has them.

        `update_cache(cache, key, value, layer_index, context)` files keys and values and returns those to attend to.
        """
        query, key, value = self._rotated(hidden_states, *position_embeddings)
        if cache is not None and update_cache is not None:
            key, value = update_cache(cache, key, value, self.layer_idx, context)
        if self.sinks is not None:
            context["s_aux"] = self.sinks  # the interface's name
        attended, weights = attention_function(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            **context,
        )
        return self.o_proj(attended.reshape(*hidden_states.shape[:-1], -1)), weights

    def _rotated(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [batch, heads, sequence, head_dim] each."""
        norm, heads = self.q_norm, (self.num_heads, self.num_key_value_heads)
        plain = norm is None or (is_plain(norm, LigerRMSNorm) and is_plain(self.k_norm, LigerRMSNorm))
        if plain and runs_packed(self, self.qkv_proj):
            qkv = self.qkv_proj(hidden_states)
            if norm is None:
                return ops.qkv_rope(qkv, cos, sin, *heads, self.interleaved)
            numbers = (norm.eps, norm.offset, norm.scale_in_fp32, self.interleaved)
            return ops.qk_norm_rope(qkv, norm.weight, self.k_norm.weight, cos, sin, *heads, *numbers)
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if norm is not None:
            query, key = norm(query), self.k_norm(key)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        return *ops.rope(query, key, cos, sin, self.interleaved), value


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention by plain matrix products, which also returns its weights: what "eager" names in the stock models.

    Args:
        query: [batch, heads, query length, head_dim].
        key, value: [batch, key-value heads, key length, head_dim].
        attention_mask: added to the scores, broadcastable to [batch, heads, query length, key length], or None.
        softcap: cap of the scores before the mask is added, or None.
        s_aux: [heads], for each head one more score, without a value (a sink), or None.

    Returns:
        [batch, query length, heads, head_dim] and the weights [batch, heads, query length, key length].
    """
    groups = module.num_key_value_groups
    key, value = (tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor for tensor in (key, value))
    scores = softcapped(torch.matmul(query, key.transpose(2, 3)) * scaling, softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:
        sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks.to(scores.dtype)), dim=-1)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
