"""AutoModel registration: `AutoModelForCausalLM` builds native classes, until it is undone."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

# For each model type: the module of its family and the stem of its class names.
FAMILIES = {
    "llama": ("liger_models.models.llama", "LigerLlama"),
    "qwen2": ("liger_models.models.qwen2", "LigerQwen2"),
    "qwen3": ("liger_models.models.qwen3", "LigerQwen3"),
    "qwen3_moe": ("liger_models.models.qwen3_moe", "LigerQwen3Moe"),
    "gemma": ("liger_models.models.gemma", "LigerGemma"),
    "gemma2": ("liger_models.models.gemma2", "LigerGemma2"),
    "gemma3_text": ("liger_models.models.gemma3", "LigerGemma3"),
    "gpt_oss": ("liger_models.models.gpt_oss", "LigerGptOss"),
    "glm": ("liger_models.models.glm", "LigerGlm"),
    "glm4": ("liger_models.models.glm4", "LigerGlm4"),
}

# Model types whose models see images too, likewise. Their language-modelling head has another ending.
MULTIMODAL_FAMILIES = {
    "gemma3": ("liger_models.models.gemma3_multimodal", "LigerGemma3"),
    "internvl": ("liger_models.models.internvl", "LigerInternVL"),
}
# Model types of checkpoints in another layout, which the native class of a family reads without their own code.
ORIGINAL_TYPES = {"internvl_chat": "internvl"}
_MULTIMODAL_ENDING = "ForConditionalGeneration"

# The Auto classes that get native classes, and the ending of their names. AutoModel is not among them: the *stock*
# classification heads ask AutoModel for their base model and would be built on a native one.
_HEADS = {AutoModelForCausalLM: "ForCausalLM", AutoModelForSequenceClassification: "ForSequenceClassification"}
# For the multimodal types, as in transformers' own mappings.
_MULTIMODAL_HEADS = (AutoModelForCausalLM, AutoModelForImageTextToText)

_registrations: list[_Registration] = []


class UnsupportedModelError(ValueError):
    """A model type for which there is no native class."""


def native_class(model_type: str, ending: str = "ForCausalLM") -> type[PreTrainedModel]:
    """The native class of a model type ("llama") with a head ("ForCausalLM", "ForSequenceClassification", "Model").

    A model that sees images ("gemma3") has one head, "ForConditionalGeneration", which "ForCausalLM" means too.

    Raises:
        UnsupportedModelError: there is none; the message lists those there are.
    """
    if model_type in MULTIMODAL_FAMILIES and ending in ("ForCausalLM", _MULTIMODAL_ENDING):
        module, stem = MULTIMODAL_FAMILIES[model_type]
        return getattr(import_module(module), stem + _MULTIMODAL_ENDING)
    if model_type not in FAMILIES:
        there = ", ".join(sorted({*FAMILIES, *MULTIMODAL_FAMILIES}))
        raise UnsupportedModelError(f"no native class for model type {model_type!r} {ending}; there are classes for {there}")
    module, stem = FAMILIES[model_type]
    return getattr(import_module(module), stem + ending)


class _Registration:
    """What `register_auto_models` did and how to undo it. Leaving a `with` block undoes it, unless that happened already."""

    def __init__(self):
        self._before: dict[tuple[Any, Any], Any] = {}
        for auto_class, ending in _HEADS.items():
            for model_type in FAMILIES:
                self._register(auto_class, native_class(model_type, ending))
        for auto_class in _MULTIMODAL_HEADS:
            for model_type in MULTIMODAL_FAMILIES:
                self._register(auto_class, native_class(model_type, _MULTIMODAL_ENDING))
        _registrations.append(self)

    def _register(self, auto_class: Any, cls: Any) -> None:
        self._before[auto_class, cls] = auto_class._model_mapping._extra_content.get(cls.config_class)
        auto_class.register(cls.config_class, cls, exist_ok=True)

    def undo(self) -> None:
        if self not in _registrations:
            return
        _registrations.remove(self)
        for (auto_class, cls), before in self._before.items():
            registered = auto_class._model_mapping._extra_content
            if registered.get(cls.config_class) is not cls:
                continue  # somebody has registered another class since: theirs stays
            if before is None:
                del registered[cls.config_class]
            else:
                registered[cls.config_class] = before

    def __enter__(self) -> _Registration:
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()


def register_auto_models() -> _Registration:
    """Let AutoModelForCausalLM, AutoModelForSequenceClassification and AutoModelForImageTextToText build native classes.

    A plain call holds until `unregister_auto_models()`; as a context manager it holds within the block. Calls nest.
    """
    return _Registration()


def unregister_auto_models() -> None:
    """Undo the last `register_auto_models()`: what stood there before stands there again. Without one, do nothing."""
    if _registrations:
        _registrations[-1].undo()


class LigerAutoModelForCausalLM:
    """The native causal language model for a checkpoint or configuration, by its model type."""

    def __init__(self, *_: Any, **__: Any):
        raise TypeError(
            "LigerAutoModelForCausalLM is not instantiated: call LigerAutoModelForCausalLM.from_pretrained(directory or hub "
            "id) or LigerAutoModelForCausalLM.from_config(config)"
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs) -> PreTrainedModel:
        """As AutoModelForCausalLM.from_pretrained. Raises UnsupportedModelError for a type without a native class."""
        config = kwargs.get("config")
        if not isinstance(config, PreTrainedConfig):
            options = {name: value for name, value in kwargs.items() if name != "config"}
            source = config if config is not None else pretrained_model_name_or_path
            found = PreTrainedConfig.get_config_dict(source, **options)[0].get("model_type")
            if found in ORIGINAL_TYPES:
                native = native_class(ORIGINAL_TYPES[found])
                return native.from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
            config, _ = AutoConfig.from_pretrained(source, return_unused_kwargs=True, **options)
        return native_class(config.model_type).from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **kwargs) -> PreTrainedModel:
        """As AutoModelForCausalLM.from_config: random weights. Raises UnsupportedModelError likewise."""
        return native_class(config.model_type)._from_config(config, **kwargs)
