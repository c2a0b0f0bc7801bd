"""GPT-OSS and every checkpoint whose configuration says `"model_type": "gpt_oss"`."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import OutputRecorder

from liger_models.compat import takes_cache
from liger_models.conversions.gpt_oss import MAPPING
from liger_models.decoder import LigerDecoderForSequenceClassification, LigerRotaryEmbedding
from liger_models.layers.attention import LigerAttention
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.moe import LigerClampedExperts, LigerTopKSoftmaxRouter
from liger_models.layers.norm import LigerRMSNorm, add_norm
from liger_models.moe import LigerMoeDecoderForCausalLM, LigerMoeDecoderModel


class LigerGptOssMixture(nn.Module):
    """Each token's top_k of clamped SwiGLU experts, weighted. Source: GptOssMLP."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, *, alpha: float, limit: float):
        super().__init__()
        self.router = LigerTopKSoftmaxRouter(hidden_size, num_experts, top_k)
        self.experts = LigerClampedExperts(num_experts, hidden_size, intermediate_size, alpha=alpha, limit=limit)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        tokens = hidden_states.flatten(0, 1)
        _, weights, ids = self.router(tokens)
        return self.experts(tokens, ids, weights).view_as(hidden_states)


class LigerGptOssBlock(GradientCheckpointingLayer):
    """Pre-norm attention with sinks, over a window in some blocks, and pre-norm experts. Source: GptOssDecoderLayer."""

    def __init__(self, config: GptOssConfig, layer_index: int):
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
            sliding_window=config.sliding_window if config.layer_types[layer_index] == "sliding_attention" else None,
            sinks=True,
        )
        self.mlp = LigerGptOssMixture(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            alpha=config.swiglu_alpha,
            limit=config.swiglu_limit,
        )
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)

    @takes_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **context: Any) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), cache=cache, **context)
        normed, hidden_states = add_norm(self.post_attention_layernorm, attended, residual=hidden_states)
        return hidden_states + self.mlp(normed)


def _norm(config: GptOssConfig) -> LigerRMSNorm:
    return LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps, scale_in_fp32=True)


class LigerGptOssModel(LigerMoeDecoderModel):
    """The GPT-OSS decoder without a head. Reads and writes GptOssModel checkpoints."""

    config_class = GptOssConfig
    stock_name = "GptOssModel"
    checkpoint_mapping = MAPPING
    weight_formats = ("stock", "mxfp4")
    _no_split_modules: ClassVar[list[str]] = ["LigerGptOssBlock"]
    _supports_sdpa = False  # it has no sinks
    _keep_in_fp32_modules: ClassVar[list[str]] = ["post_attention_layernorm", "input_layernorm", "norm"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "router_logits": OutputRecorder(LigerTopKSoftmaxRouter, index=0),
        "hidden_states": LigerGptOssBlock,
        "attentions": LigerAttention,
    }

    def __init__(self, config: GptOssConfig):
        super().__init__(config)
        self.layer_types = config.layer_types
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LigerGptOssBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = _norm(config)
        self.rotary_emb = LigerRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class LigerGptOssForCausalLM(LigerMoeDecoderForCausalLM):
    """GPT-OSS with its language-modelling head. Reads and writes GptOssForCausalLM checkpoints, in bfloat16 and in MXFP4."""

    stock_name = "GptOssForCausalLM"
    model_class = LigerGptOssModel


class LigerGptOssForSequenceClassification(LigerDecoderForSequenceClassification):
    """GPT-OSS with a classification head. Reads and writes GptOssForSequenceClassification checkpoints."""

    stock_name = "GptOssForSequenceClassification"
    model_class = LigerGptOssModel
