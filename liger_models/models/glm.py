"""GLM-4-9B in its -hf form and every checkpoint whose configuration says `"model_type": "glm"`."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import GlmConfig
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_models.compat import takes_cache
from liger_models.conversions.glm import MAPPING
from liger_models.decoder import (
    LigerDecoderForCausalLM,
    LigerDecoderForSequenceClassification,
    LigerDecoderModel,
    LigerPartialRotaryEmbedding,
    head_dim_of,
)
from liger_models.layers.attention import LigerAttention
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.mlp import FUSED_ACTIVATIONS, LigerJointGatedMLP
from liger_models.layers.norm import LigerRMSNorm, add_norm


class LigerGlmBlock(GradientCheckpointingLayer):
    """Pre-norm attention with partial, interleaved rotation and pre-norm gated MLP. Source: GlmDecoderLayer."""

    def __init__(self, config: GlmConfig, layer_index: int):
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
            output_bias=False,
            interleaved=True,
        )
        self.mlp = LigerJointGatedMLP(
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


class LigerGlmModel(LigerDecoderModel):
    """The GLM decoder without a head. Reads and writes GlmModel checkpoints."""

    config_class = GlmConfig
    stock_name = "GlmModel"
    checkpoint_mapping = MAPPING
    _no_split_modules: ClassVar[list[str]] = ["LigerGlmBlock"]
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": LigerGlmBlock, "attentions": LigerAttention}

    def __init__(self, config: GlmConfig):
        super().__init__(config)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LigerGlmBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LigerPartialRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class LigerGlmForCausalLM(LigerDecoderForCausalLM):
    """GLM with its language-modelling head. Reads and writes GlmForCausalLM checkpoints."""

    stock_name = "GlmForCausalLM"
    model_class = LigerGlmModel


class LigerGlmForSequenceClassification(LigerDecoderForSequenceClassification):
    """GLM with a classification head. Reads and writes GlmForSequenceClassification checkpoints."""

    stock_name = "GlmForSequenceClassification"
    model_class = LigerGlmModel
