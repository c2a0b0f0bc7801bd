"""Liger-native model classes that load and save stock Hugging Face checkpoints.

Importing this package imports neither torch nor transformers and changes nothing outside itself: public names resolve on
first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_MODULE_OF = {
    "LigerLlamaModel": "liger_models.models.llama",
    "LigerLlamaForCausalLM": "liger_models.models.llama",
    "LigerLlamaForSequenceClassification": "liger_models.models.llama",
    "LigerAutoModelForCausalLM": "liger_models.auto",
    "register_auto_models": "liger_models.auto",
    "unregister_auto_models": "liger_models.auto",
}
_SUBMODULES = ("losses", "ops")

__all__ = [*_MODULE_OF, *_SUBMODULES]

if TYPE_CHECKING:
    from liger_models import losses, ops
    from liger_models.auto import LigerAutoModelForCausalLM, register_auto_models, unregister_auto_models
    from liger_models.models.llama import (
        LigerLlamaForCausalLM,
        LigerLlamaForSequenceClassification,
        LigerLlamaModel,
    )


def __getattr__(name: str):
    if name in _SUBMODULES:
        return import_module(f"liger_models.{name}")
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'liger_models' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
