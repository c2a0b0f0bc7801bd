"""Llama 2, 3, 3.1 to 3.3, and every checkpoint whose configuration says `"model_type": "llama"`."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_models.compat import takes_cache
from liger_models.conversions.llama import MAPPING
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


class LigerLlamaBlock(GradientCheckpointingLayer):
    """Pre-norm attention and pre-norm gated MLP, each added to the residual stream. Source: LlamaDecoderLayer."""

    def __init__(self, config: LlamaConfig, layer_index: int):
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
            bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        self.mlp = LigerGatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=ACT2FN[config.hidden_act],
            fused_activation=FUSED_ACTIVATIONS.get(config.hidden_act),
            bias=config.mlp_bias,
        )
        self.input_layernorm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @takes_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **context: Any) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), cache=cache, **context)
        normed, hidden_states = add_norm(self.post_attention_layernorm, attended, residual=hidden_states)
        return hidden_states + self.mlp(normed)


class LigerLlamaModel(LigerDecoderModel):
    """The Llama decoder without a head. Reads and writes LlamaModel checkpoints."""

    config_class = LlamaConfig
    stock_name = "LlamaModel"
    checkpoint_mapping = MAPPING
    _no_split_modules: ClassVar[list[str]] = ["LigerLlamaBlock"]
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": LigerLlamaBlock, "attentions": LigerAttention}

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LigerLlamaBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LigerRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class LigerLlamaForCausalLM(LigerDecoderForCausalLM):
    """Llama with its language-modelling head. Reads and writes LlamaForCausalLM checkpoints."""

    stock_name = "LlamaForCausalLM"
    model_class = LigerLlamaModel


class LigerLlamaForSequenceClassification(LigerDecoderForSequenceClassification):
    """Llama with a classification head. Reads and writes LlamaForSequenceClassification checkpoints."""

    stock_name = "LlamaForSequenceClassification"
    model_class = LigerLlamaModel
