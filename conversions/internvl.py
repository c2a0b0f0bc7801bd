"""InternVL: checkpoint keys, of the stock layouts and of OpenGVLab's original one, <-> native parameters."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from liger_models.conversions.packing import packed

VISION_MAPPING = [packed("attention", "qkv_proj", ("q_proj", "k_proj", "v_proj"))]
# The stock classes' own renamings of the older layout (`language_model.model.…`, `vision_tower.…` at the top level).
MAPPING = get_checkpoint_conversion_mapping("InternVLModel")
HEAD_MAPPING = get_checkpoint_conversion_mapping("internvl")

# From the original layout to the older stock one, one after the other; its fused `qkv` is the packed layer as it is. What is
# not named (`language_model.…`) has the same name in both.
ORIGINAL_LAYOUT = {
    r"^vision_model\.embeddings\.class_embedding$": "vision_tower.embeddings.cls_token",
    r"^vision_model\.embeddings\.position_embedding$": "vision_tower.embeddings.position_embeddings",
    r"^vision_model\.embeddings\.patch_embedding\.": "vision_tower.embeddings.patch_embeddings.projection.",
    r"^(vision_model\.encoder\.layers\.\d+)\.attn\.qkv\.": r"\1.attention.qkv_proj.",
    r"^(vision_model\.encoder\.layers\.\d+)\.attn\.proj\.": r"\1.attention.projection_layer.",
    r"^(vision_model\.encoder\.layers\.\d+)\.attn\.q_norm\.": r"\1.attention.q_norm.",
    r"^(vision_model\.encoder\.layers\.\d+)\.attn\.k_norm\.": r"\1.attention.k_norm.",
    r"^(vision_model\.encoder\.layers\.\d+)\.norm1\.": r"\1.layernorm_before.",
    r"^(vision_model\.encoder\.layers\.\d+)\.norm2\.": r"\1.layernorm_after.",
    r"^(vision_model\.encoder\.layers\.\d+)\.ls1$": r"\1.lambda_1",
    r"^(vision_model\.encoder\.layers\.\d+)\.ls2$": r"\1.lambda_2",
    r"^vision_model\.encoder\.layers\.": "vision_tower.encoder.layer.",
    r"^mlp1\.0\.": "multi_modal_projector.layer_norm.",
    r"^mlp1\.1\.": "multi_modal_projector.linear_1.",
    r"^mlp1\.3\.": "multi_modal_projector.linear_2.",
}
