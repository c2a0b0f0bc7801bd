"""Gemma 3 with images: stock checkpoint keys <-> native parameters, beside those of its text model and its vision tower."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# The stock classes' own renamings of the older layout (`language_model.model.…`, `vision_tower.…` at the top level).
MAPPING = get_checkpoint_conversion_mapping("Gemma3Model")
HEAD_MAPPING = get_checkpoint_conversion_mapping("gemma3")
