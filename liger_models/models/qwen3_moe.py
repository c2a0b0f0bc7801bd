"""Qwen3-MoE and every checkpoint whose configuration says `"model_type": "qwen3_moe"`."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import OutputRecorder

from liger_models.compat import takes_cache
from liger_models.conversions.qwen3_moe import MAPPING
from liger_models.decoder import LigerDecoderForSequenceClassification, LigerRotaryEmbedding, head_dim_of
from liger_models.layers.attention import LigerAttention
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.mlp import FUSED_ACTIVATIONS, LigerGatedMLP
from liger_models.layers.moe import LigerExperts, LigerSoftmaxTopKRouter
from liger_models.layers.norm import LigerRMSNorm, add_norm
from liger_models.moe import LigerMoeDecoderForCausalLM, LigerMoeDecoderModel


class LigerQwen3MoeMixture(nn.Module):
    """Each token's top_k of SwiGLU experts, weighted. Source: Qwen3MoeSparseMoeBlock."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, *, normalise: bool):
        super().__init__()
        self.gate = LigerSoftmaxTopKRouter(hidden_size, num_experts, top_k, normalise=normalise)
        self.experts = LigerExperts(num_experts, hidden_size, intermediate_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        tokens = hidden_states.flatten(0, 1)
        _, weights, ids = self.gate(tokens)
        return self.experts(tokens, ids, weights).view_as(hidden_states)


class LigerQwen3MoeBlock(GradientCheckpointingLayer):
    """Pre-norm attention over normalised queries and keys, and pre-norm experts, or a dense MLP in some blocks. Source:
    Qwen3MoeDecoderLayer."""

    def __init__(self, config: Qwen3MoeConfig, layer_index: int):
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
            query_norm=LigerRMSNorm(head_dim, eps=config.rms_norm_eps),
            key_norm=LigerRMSNorm(head_dim, eps=config.rms_norm_eps),
            sliding_window=config.sliding_window,
        )
        self.mlp = _mixture(config) if _has_experts(config, layer_index) else _dense(config)
        self.input_layernorm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @takes_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **context: Any) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), cache=cache, **context)
        normed, hidden_states = add_norm(self.post_attention_layernorm, attended, residual=hidden_states)
        return hidden_states + self.mlp(normed)


def _has_experts(config: Qwen3MoeConfig, layer_index: int) -> bool:
    in_turn = config.num_experts > 0 and (layer_index + 1) % config.decoder_sparse_step == 0
    return in_turn and layer_index not in config.mlp_only_layers


def _mixture(config: Qwen3MoeConfig) -> LigerQwen3MoeMixture:
    if FUSED_ACTIVATIONS.get(config.hidden_act) != "silu":
        raise NotImplementedError(
            f"hidden_act={config.hidden_act!r}: the experts' op has 'silu' only, which every published Qwen3-MoE checkpoint "
            f"has; use the stock class for another activation"
        )
    return LigerQwen3MoeMixture(
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
        normalise=config.norm_topk_prob,
    )


def _dense(config: Qwen3MoeConfig) -> LigerGatedMLP:
    return LigerGatedMLP(
        config.hidden_size,
        config.intermediate_size,
        activation=ACT2FN[config.hidden_act],
        fused_activation=FUSED_ACTIVATIONS.get(config.hidden_act),
    )


class LigerQwen3MoeModel(LigerMoeDecoderModel):
    """The Qwen3-MoE decoder without a head. Reads and writes Qwen3MoeModel checkpoints."""

    config_class = Qwen3MoeConfig
    stock_name = "Qwen3MoeModel"
    checkpoint_mapping = MAPPING
    _no_split_modules: ClassVar[list[str]] = ["LigerQwen3MoeBlock"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "router_logits": OutputRecorder(LigerSoftmaxTopKRouter, index=0),
        "hidden_states": LigerQwen3MoeBlock,
        "attentions": LigerAttention,
    }

    def __init__(self, config: Qwen3MoeConfig):
        super().__init__(config)
        kind = "full_attention" if config.sliding_window is None else "sliding_attention"
        self.layer_types = (kind,) * config.num_hidden_layers
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LigerQwen3MoeBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LigerRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class LigerQwen3MoeForCausalLM(LigerMoeDecoderForCausalLM):
    """Qwen3-MoE with its language-modelling head. Reads and writes Qwen3MoeForCausalLM checkpoints."""

    stock_name = "Qwen3MoeForCausalLM"
    model_class = LigerQwen3MoeModel


class LigerQwen3MoeForSequenceClassification(LigerDecoderForSequenceClassification):
    """Qwen3-MoE with a classification head. Reads and writes Qwen3MoeForSequenceClassification checkpoints."""

    stock_name = "Qwen3MoeForSequenceClassification"
    model_class = LigerQwen3MoeModel
