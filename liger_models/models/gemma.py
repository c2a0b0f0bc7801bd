"""Gemma 1 and every checkpoint whose configuration says `"model_type": "gemma"`."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import GemmaConfig
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_models.compat import takes_cache
from liger_models.conversions.gemma import MAPPING
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


class LigerGemmaBlock(GradientCheckpointingLayer):
    """Pre-norm attention and pre-norm GELU-gated MLP. Source: GemmaDecoderLayer."""

    def __init__(self, config: GemmaConfig, layer_index: int):
        super().__init__()
        self.self_attn = LigerAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            layer_index=layer_index,
            scaling=config.head_dim**-0.5,
            dropout=config.attention_dropout,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            is_causal=not config.use_bidirectional_attention,
        )
        self.mlp = LigerGatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=ACT2FN[config.hidden_act],
            fused_activation=FUSED_ACTIVATIONS.get(config.hidden_act),
        )
        self.input_layernorm = gemma_norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = gemma_norm(config.hidden_size, eps=config.rms_norm_eps)

    @takes_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **context: Any) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), cache=cache, **context)
        normed, hidden_states = add_norm(self.post_attention_layernorm, attended, residual=hidden_states)
        return hidden_states + self.mlp(normed)


class LigerGemmaModel(LigerDecoderModel):
    """The Gemma decoder without a head. Reads and writes GemmaModel checkpoints."""

    config_class = GemmaConfig
    stock_name = "GemmaModel"
    checkpoint_mapping = MAPPING
    _no_split_modules: ClassVar[list[str]] = ["LigerGemmaBlock"]
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": LigerGemmaBlock, "attentions": LigerAttention}

    def __init__(self, config: GemmaConfig):
        super().__init__(config)
        self.embed_tokens = LigerEmbedding(
            config.vocab_size, config.hidden_size, config.pad_token_id, scale=config.hidden_size**0.5
        )
        self.layers = nn.ModuleList(LigerGemmaBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = gemma_norm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LigerRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class LigerGemmaForCausalLM(LigerDecoderForCausalLM):
    """Gemma with its language-modelling head. Reads and writes GemmaForCausalLM checkpoints."""

    stock_name = "GemmaForCausalLM"
    model_class = LigerGemmaModel


class LigerGemmaForSequenceClassification(LigerDecoderForSequenceClassification):
    """Gemma with a classification head. Reads and writes GemmaForSequenceClassification checkpoints."""

    stock_name = "GemmaForSequenceClassification"
    model_class = LigerGemmaModel
