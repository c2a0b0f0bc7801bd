"""GLM-4: stock checkpoint keys <-> native parameters."""

from liger_models.conversions.packing import packed

MAPPING = [
    packed("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
]
