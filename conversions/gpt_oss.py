"""GPT-OSS: stock checkpoint keys, in bfloat16 or MXFP4, <-> native parameters."""

from liger_models.conversions.experts import laid_out
from liger_models.conversions.packing import packed

MAPPING = [
    packed("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
    laid_out("mlp.experts", "gate_up_proj", "gate_up_weight"),
    laid_out("mlp.experts", "gate_up_proj_bias", "gate_up_bias"),
    laid_out("mlp.experts", "down_proj", "down_weight"),
    laid_out("mlp.experts", "down_proj_bias", "down_bias"),
]
