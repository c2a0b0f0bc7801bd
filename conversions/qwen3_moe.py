"""Qwen3-MoE: stock checkpoint keys <-> native parameters."""

from liger_models.conversions.experts import stacked
from liger_models.conversions.packing import packed

MAPPING = [
    packed("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
    packed("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
    stacked("mlp.experts", "gate_up_proj", ("gate_proj", "up_proj")),
    stacked("mlp.experts", "down_proj", ("down_proj",)),
]
