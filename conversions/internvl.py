"""InternVL: checkpoint keys, of the stock layouts and of OpenGVLab's original one, <-> native parameters."""

import torch
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from liger_models.conversions.packing import packed

VISION_MAPPING = [packed("attention", "qkv_proj", ("q_proj", "k_proj", "v_proj"))]
# The stock classes' own renamings of the older layout (`language_model.model.…`, `vision_tower.…` at the top level).
MAPPING = get_checkpoint_conversion_mapping("InternVLModel")
HEAD_MAPPING = get_checkpoint_conversion_mapping("internvl")

# From the original layout to the older stock one, one after the other; its fused `qkv` is the packed layer as it is. What is
# not named (`language_model.model.…`) has the same name in both, but for the text model InternLM2, a Llama under other names.
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
    r"^language_model\.output\.": "language_model.lm_head.",
    r"^language_model\.model\.tok_embeddings\.": "language_model.model.embed_tokens.",
    r"^(language_model\.model\.layers\.\d+)\.attention\.wqkv\.": r"\1.self_attn.qkv_proj.",  # its rows: see ungrouped_rows
    r"^(language_model\.model\.layers\.\d+)\.attention\.wo\.": r"\1.self_attn.o_proj.",
    r"^(language_model\.model\.layers\.\d+)\.feed_forward\.w1\.": r"\1.mlp.gate_proj.",
    r"^(language_model\.model\.layers\.\d+)\.feed_forward\.w3\.": r"\1.mlp.up_proj.",
    r"^(language_model\.model\.layers\.\d+)\.feed_forward\.w2\.": r"\1.mlp.down_proj.",
    r"^(language_model\.model\.layers\.\d+)\.attention_norm\.": r"\1.input_layernorm.",
    r"^(language_model\.model\.layers\.\d+)\.ffn_norm\.": r"\1.post_attention_layernorm.",
}


def ungrouped_rows(packed_rows: Tensor, key_value_heads: int, head_dim: int) -> Tensor:
    """The rows of InternLM2's `wqkv` in the order of `qkv_proj`: all of q, all of k, all of v.

    In `wqkv` the query heads that share a key-value head stand together, followed by that head's keys and values.

    Args:
        packed_rows: [rows] or [rows, hidden_size].
    """
    heads = packed_rows.unflatten(0, (key_value_heads, -1, head_dim))
    return torch.cat((heads[:, :-2].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)))
