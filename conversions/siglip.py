"""SigLIP's vision tower: stock checkpoint keys <-> native parameters."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from liger_models.conversions.packing import packed

# The stock class's own renamings, of older layouts, and the packing.
MAPPING = [
    *(get_checkpoint_conversion_mapping("SiglipVisionModel") or []),
    packed("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
]
