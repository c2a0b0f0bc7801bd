"""AutoModel registration: `AutoModelForCausalLM` builds native classes, until it is undone."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from liger_models.pretrained import HUB_OPTIONS, LigerPreTrainedModel

# For each model type: the module of its family and the stem of its class names.
FAMILIES = {"llama": ("liger_models.models.llama", "LigerLlama")}

# The Auto classes that get native classes, and the ending of their names. AutoModel is not among them: the *stock*
# classification heads ask AutoModel for their base model and would be built on a native one.
_HEADS = {AutoModelForCausalLM: "ForCausalLM", AutoModelForSequenceClassification: "ForSequenceClassification"}

_previous: list[dict] = []


class UnsupportedModelError(ValueError):
    """A model type for which there is no native class."""


def native_class(model_type: str, ending: str = "ForCausalLM") -> type[LigerPreTrainedModel]:
    """The native class of a model type ("llama") with a head ("ForCausalLM", "ForSequenceClassification", "Model").

    Raises:
        UnsupportedModelError: there is none; the message lists those there are.
    """
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"no native class for model type {model_type!r}; there are classes for {', '.join(sorted(FAMILIES))}"
        )
    module, stem = FAMILIES[model_type]
    return getattr(import_module(module), stem + ending)


class _Registration:
    """What `register_auto_models` returns: leaving a `with` block undoes the registration."""

    def __enter__(self) -> _Registration:
        return self

    def __exit__(self, *_: Any) -> None:
        unregister_auto_models()


def register_auto_models() -> _Registration:
    """Let AutoModelForCausalLM and AutoModelForSequenceClassification build native classes for every supported type.

    A plain call holds until `unregister_auto_models()`; as a context manager it holds within the block. Calls nest.
    """
    before = {}
    for auto_class, ending in _HEADS.items():
        for model_type in FAMILIES:
            cls = native_class(model_type, ending)
            registered = auto_class._model_mapping._extra_content
            before[auto_class, cls.config_class] = registered.get(cls.config_class)
            auto_class.register(cls.config_class, cls, exist_ok=True)
    _previous.append(before)
    return _Registration()


def unregister_auto_models() -> None:
    """Undo the last `register_auto_models()`: what stood there before stands there again. Without one, do nothing."""
    if not _previous:
        return
    for (auto_class, config_class), cls in _previous.pop().items():
        registered = auto_class._model_mapping._extra_content
        if cls is None:
            registered.pop(config_class, None)
        else:
            registered[config_class] = cls


class LigerAutoModelForCausalLM:
    """The native causal language model for a checkpoint or configuration, by its model type."""

    def __init__(self, *_: Any, **__: Any):
        raise TypeError(
            "LigerAutoModelForCausalLM is not instantiated: call LigerAutoModelForCausalLM.from_pretrained(directory or hub "
            "id) or LigerAutoModelForCausalLM.from_config(config)"
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs) -> LigerPreTrainedModel:
        """As AutoModelForCausalLM.from_pretrained. Raises UnsupportedModelError for a type without a native class."""
        config = kwargs.get("config")
        if not isinstance(config, PreTrainedConfig):
            options = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
            config = AutoConfig.from_pretrained(config or pretrained_model_name_or_path, **options)
        return native_class(config.model_type).from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **kwargs) -> LigerPreTrainedModel:
        """As AutoModelForCausalLM.from_config: random weights. Raises UnsupportedModelError likewise."""
        return native_class(config.model_type)._from_config(config, **kwargs)
