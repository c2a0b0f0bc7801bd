"""Qwen2, Qwen2.5 and every checkpoint whose configuration says `"model_type": "qwen2"`."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import Qwen2Config
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_models.compat import takes_cache
from liger_models.conversions.qwen2 import MAPPING
from liger_models.decoder import (
    LigerDecoderForCausalLM,
    LigerDecoderForSequenceClassification,
    LigerDecoderModel,
    LigerRotaryEmbedding,
    head_dim_of,
)
from liger_models.layers.attention import LigerAttention
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.mlp import FUSED_ACTIVATIONS, LigerGatedMLP
from liger_models.layers.norm import LigerRMSNorm, add_norm


class LigerQwen2Block(GradientCheckpointingLayer):
    """Pre-norm attention with biases on q, k and v, and pre-norm gated MLP. Source: Qwen2DecoderLayer."""

    def __init__(self, config: Qwen2Config, layer_index: int):
        super().__init__()
        head_dim = head_dim_of(config)
        self.self_attn = LigerAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            layer_index=layer_index,
            scaling=head_dim**-0.5,
            dropout=config.attention_dropout,
            bias=True,
            output_bias=False,
            sliding_window=config.sliding_window if config.layer_types[layer_index] == "sliding_attention" else None,
        )
        self.mlp = LigerGatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=ACT2FN[config.hidden_act],
            fused_activation=FUSED_ACTIVATIONS.get(config.hidden_act),
        )
        self.input_layernorm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @takes_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **context: Any) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), cache=cache, **context)
        normed, hidden_states = add_norm(self.post_attention_layernorm, attended, residual=hidden_states)
        return hidden_states + self.mlp(normed)


class LigerQwen2Model(LigerDecoderModel):
    """The Qwen2 decoder without a head. Reads and writes Qwen2Model checkpoints."""

    config_class = Qwen2Config
    stock_name = "Qwen2Model"
    checkpoint_mapping = MAPPING
    _no_split_modules: ClassVar[list[str]] = ["LigerQwen2Block"]
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": LigerQwen2Block, "attentions": LigerAttention}

    def __init__(self, config: Qwen2Config):
        super().__init__(config)
        self.layer_types = config.layer_types
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LigerQwen2Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LigerRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class LigerQwen2ForCausalLM(LigerDecoderForCausalLM):
    """Qwen2 with its language-modelling head. Reads and writes Qwen2ForCausalLM checkpoints."""

    stock_name = "Qwen2ForCausalLM"
    model_class = LigerQwen2Model


class LigerQwen2ForSequenceClassification(LigerDecoderForSequenceClassification):
    """Qwen2 with a classification head. Reads and writes Qwen2ForSequenceClassification checkpoints."""

    stock_name = "Qwen2ForSequenceClassification"
    model_class = LigerQwen2Model
