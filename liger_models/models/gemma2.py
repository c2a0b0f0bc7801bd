"""Gemma 2 and every checkpoint whose configuration says `"model_type": "gemma2"`."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import Gemma2Config
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_models.compat import takes_cache
from liger_models.conversions.gemma2 import MAPPING
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


class LigerGemma2Block(GradientCheckpointingLayer):
    """Attention with capped scores and GELU-gated MLP, each between two norms. Source: Gemma2DecoderLayer."""

    def __init__(self, config: Gemma2Config, layer_index: int):
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
            sliding_window=config.sliding_window if config.layer_types[layer_index] == "sliding_attention" else None,
            softcap=config.attn_logit_softcapping,
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


class LigerGemma2Model(LigerDecoderModel):
    """The Gemma 2 decoder without a head. Reads and writes Gemma2Model checkpoints."""

    config_class = Gemma2Config
    stock_name = "Gemma2Model"
    checkpoint_mapping = MAPPING
    _no_split_modules: ClassVar[list[str]] = ["LigerGemma2Block"]
    _supports_sdpa = False  # it has no cap of the scores
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": LigerGemma2Block, "attentions": LigerAttention}

    def __init__(self, config: Gemma2Config):
        super().__init__(config)
        self.layer_types = config.layer_types
        self.embed_tokens = LigerEmbedding(
            config.vocab_size, config.hidden_size, config.pad_token_id, scale=config.hidden_size**0.5
        )
        self.layers = nn.ModuleList(LigerGemma2Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = gemma_norm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LigerRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class LigerGemma2ForCausalLM(LigerDecoderForCausalLM):
    """Gemma 2 with its language-modelling head. Reads and writes Gemma2ForCausalLM checkpoints."""

    stock_name = "Gemma2ForCausalLM"
    model_class = LigerGemma2Model

    def __init__(self, config: Gemma2Config):
        super().__init__(config)
        self.logit_softcap = config.final_logit_softcapping


class LigerGemma2ForSequenceClassification(LigerDecoderForSequenceClassification):
    """Gemma 2 with a classification head. Reads and writes Gemma2ForSequenceClassification checkpoints."""

    stock_name = "Gemma2ForSequenceClassification"
    model_class = LigerGemma2Model
