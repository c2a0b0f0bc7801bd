"""Gemma 3: its text models (`"model_type": "gemma3_text"`)."""

from collections.abc import Callable
from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Gemma3TextConfig
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_models.compat import takes_cache
from liger_models.conversions.gemma3 import MAPPING
from liger_models.decoder import (
    LigerDecoderForCausalLM,
    LigerDecoderForSequenceClassification,
    LigerDecoderModel,
    LigerRotaryEmbedding,
)
from liger_models.layers.attention import LigerAttention
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.mlp import FUSED_ACTIVATIONS, LigerGatedMLP
from liger_models.layers.norm import add_norm, gemma_norm


def _of_layer_type(config: Gemma3TextConfig, kind: str) -> Gemma3TextConfig:
    """The configuration as a model with this one kind of layers would have it: with this kind's rotation."""
    config = copy(config)
    config.rope_parameters = config.rope_parameters[kind]
    return config


class LigerGemma3Block(GradientCheckpointingLayer):
    """Attention over normalised queries and keys and GELU-gated MLP, each between two norms. Source: Gemma3DecoderLayer."""

    def __init__(self, config: Gemma3TextConfig, layer_index: int):
        super().__init__()
        self.self_attn = LigerAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            layer_index=layer_index,
            scaling=config.query_pre_attn_scalar**-0.5,
            dropout=config.attention_dropout,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            query_norm=gemma_norm(config.head_dim, eps=config.rms_norm_eps),
            key_norm=gemma_norm(config.head_dim, eps=config.rms_norm_eps),
            sliding_window=config.sliding_window if config.layer_types[layer_index] == "sliding_attention" else None,
            is_causal=not config.use_bidirectional_attention,
        )
        self.mlp = LigerGatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=ACT2FN[config.hidden_activation],
            fused_activation=FUSED_ACTIVATIONS.get(config.hidden_activation),
        )
        self.input_layernorm = gemma_norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = gemma_norm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_feedforward_layernorm = gemma_norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = gemma_norm(config.hidden_size, eps=config.rms_norm_eps)

    @takes_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **context: Any) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), cache=cache, **context)
        attended = self.post_attention_layernorm(attended)
        normed, hidden_states = add_norm(self.pre_feedforward_layernorm, attended, residual=hidden_states)
        return hidden_states + self.post_feedforward_layernorm(self.mlp(normed))


class LigerGemma3Model(LigerDecoderModel):
    """The Gemma 3 text decoder without a head. Reads and writes Gemma3TextModel checkpoints."""

    config_class = Gemma3TextConfig
    stock_name = "Gemma3TextModel"
    checkpoint_mapping = MAPPING
    _no_split_modules: ClassVar[list[str]] = ["LigerGemma3Block"]
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": LigerGemma3Block, "attentions": LigerAttention}

    def __init__(self, config: Gemma3TextConfig):
        super().__init__(config)
        self.layer_types = config.layer_types
        self.embed_tokens = LigerEmbedding(
            config.vocab_size, config.hidden_size, config.pad_token_id, scale=config.hidden_size**0.5
        )
        self.layers = nn.ModuleList(LigerGemma3Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = gemma_norm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = nn.ModuleDict(
            {kind: LigerRotaryEmbedding(_of_layer_type(config, kind)) for kind in dict.fromkeys(config.layer_types)}
        )
        self.gradient_checkpointing = False
        if config.use_bidirectional_attention:
            self.mask_options = {
                "full_attention": {"or_mask_function": _everything},
                "sliding_attention": {"or_mask_function": _both_ways(config.sliding_window)},
            }
        self.post_init()

    def _rotations(self, hidden_states: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {kind: rotary(hidden_states, positions) for kind, rotary in self.rotary_emb.items()}


def _everything(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.tensor(True)


def _both_ways(window: int) -> Callable:
    """Whether query and key are less than a window apart, whichever comes first."""
    return lambda batch, head, query, key: abs(query - key) < window


class LigerGemma3ForCausalLM(LigerDecoderForCausalLM):
    """Gemma 3 text with its language-modelling head. Reads and writes Gemma3ForCausalLM checkpoints."""

    stock_name = "Gemma3ForCausalLM"
    model_class = LigerGemma3Model

    def __init__(self, config: Gemma3TextConfig):
        super().__init__(config)
        self.logit_softcap = config.final_logit_softcapping


class LigerGemma3ForSequenceClassification(LigerDecoderForSequenceClassification):
    """Gemma 3 text with a classification head. Reads and writes Gemma3TextForSequenceClassification checkpoints."""

    stock_name = "Gemma3TextForSequenceClassification"
    model_class = LigerGemma3Model
