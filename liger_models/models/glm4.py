"""GLM-4-0414 and every checkpoint whose configuration says `"model_type": "glm4"`."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import Glm4Config
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_models.compat import takes_cache
from liger_models.conversions.glm4 import MAPPING
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


class LigerGlm4Block(GradientCheckpointingLayer):
    """Attention with partial, interleaved rotation and gated MLP, each between two norms. Source: Glm4DecoderLayer."""

    def __init__(self, config: Glm4Config, layer_index: int):
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
        self.post_self_attn_layernorm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_mlp_layernorm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @takes_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **context: Any) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), cache=cache, **context)
        attended = self.post_self_attn_layernorm(attended)
        normed, hidden_states = add_norm(self.post_attention_layernorm, attended, residual=hidden_states)
        return hidden_states + self.post_mlp_layernorm(self.mlp(normed))


class LigerGlm4Model(LigerDecoderModel):
    """The GLM-4 decoder without a head. Reads and writes Glm4Model checkpoints."""

    config_class = Glm4Config
    stock_name = "Glm4Model"
    checkpoint_mapping = MAPPING
    _no_split_modules: ClassVar[list[str]] = ["LigerGlm4Block"]
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": LigerGlm4Block, "attentions": LigerAttention}

    def __init__(self, config: Glm4Config):
        super().__init__(config)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LigerGlm4Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LigerPartialRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class LigerGlm4ForCausalLM(LigerDecoderForCausalLM):
    """GLM-4 with its language-modelling head. Reads and writes Glm4ForCausalLM checkpoints."""

    stock_name = "Glm4ForCausalLM"
    model_class = LigerGlm4Model


class LigerGlm4ForSequenceClassification(LigerDecoderForSequenceClassification):
    """GLM-4 with a classification head. Reads and writes Glm4ForSequenceClassification checkpoints."""

    stock_name = "Glm4ForSequenceClassification"
    model_class = LigerGlm4Model
