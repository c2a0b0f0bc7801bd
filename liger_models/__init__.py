"""Liger-native model classes that load and save stock Hugging Face checkpoints.

Importing this package imports neither torch nor transformers and changes nothing outside itself: public names resolve on
first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# For each family: the module, and the stem of its class names.
_FAMILIES = {
    "llama": "LigerLlama",
    "qwen2": "LigerQwen2",
    "qwen3": "LigerQwen3",
    "qwen3_moe": "LigerQwen3Moe",
    "gemma": "LigerGemma",
    "gemma2": "LigerGemma2",
    "gemma3": "LigerGemma3",
    "gpt_oss": "LigerGptOss",
    "glm": "LigerGlm",
    "glm4": "LigerGlm4",
}
_HEADS = ("Model", "ForCausalLM", "ForSequenceClassification")
_MODULE_OF = {
    **{stem + head: f"liger_models.models.{family}" for family, stem in _FAMILIES.items() for head in _HEADS},
    "LigerGemma3MultimodalModel": "liger_models.models.gemma3_multimodal",
    "LigerGemma3ForConditionalGeneration": "liger_models.models.gemma3_multimodal",
    "LigerInternVLModel": "liger_models.models.internvl",
    "LigerInternVLForConditionalGeneration": "liger_models.models.internvl",
    "LigerAutoModelForCausalLM": "liger_models.auto",
    "register_auto_models": "liger_models.auto",
    "unregister_auto_models": "liger_models.auto",
}
_SUBMODULES = ("losses", "ops")

__all__ = [*_MODULE_OF, *_SUBMODULES]

if TYPE_CHECKING:
    from liger_models import losses, ops
    from liger_models.auto import LigerAutoModelForCausalLM, register_auto_models, unregister_auto_models
    from liger_models.models.gemma import LigerGemmaForCausalLM, LigerGemmaForSequenceClassification, LigerGemmaModel
    from liger_models.models.gemma2 import LigerGemma2ForCausalLM, LigerGemma2ForSequenceClassification, LigerGemma2Model
    from liger_models.models.gemma3 import LigerGemma3ForCausalLM, LigerGemma3ForSequenceClassification, LigerGemma3Model
    from liger_models.models.gemma3_multimodal import LigerGemma3ForConditionalGeneration, LigerGemma3MultimodalModel
    from liger_models.models.glm import LigerGlmForCausalLM, LigerGlmForSequenceClassification, LigerGlmModel
    from liger_models.models.glm4 import LigerGlm4ForCausalLM, LigerGlm4ForSequenceClassification, LigerGlm4Model
    from liger_models.models.gpt_oss import LigerGptOssForCausalLM, LigerGptOssForSequenceClassification, LigerGptOssModel
    from liger_models.models.internvl import LigerInternVLForConditionalGeneration, LigerInternVLModel
    from liger_models.models.llama import LigerLlamaForCausalLM, LigerLlamaForSequenceClassification, LigerLlamaModel
    from liger_models.models.qwen2 import LigerQwen2ForCausalLM, LigerQwen2ForSequenceClassification, LigerQwen2Model
    from liger_models.models.qwen3 import LigerQwen3ForCausalLM, LigerQwen3ForSequenceClassification, LigerQwen3Model
    from liger_models.models.qwen3_moe import (
        LigerQwen3MoeForCausalLM,
        LigerQwen3MoeForSequenceClassification,
        LigerQwen3MoeModel,
    )


def __getattr__(name: str):
    if name in _SUBMODULES:
        return import_module(f"liger_models.{name}")
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'liger_models' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
