"""The families: which native class reads which stock architecture."""

from importlib import import_module

from liger_models.auto import FAMILIES, MULTIMODAL_FAMILIES, UnsupportedModelError
from liger_models.cli.output import print_table
from liger_models.cli.source import CheckpointFolder
from liger_models.pretrained import LigerPreTrainedModel

_MODULES = {model_type: module for model_type, (module, _) in {**FAMILIES, **MULTIMODAL_FAMILIES}.items()}


def families() -> None:
    """Print a row for each class of each family."""
    rows = [
        (model_type, cls.__name__, architecture, ", ".join(cls.weight_formats))
        for model_type in _MODULES
        for architecture, cls in classes_of(model_type).items()
    ]
    print_table(("model type", "native class", "stock architecture", "formats"), rows)


def classes_of(model_type: str) -> dict[str, type[LigerPreTrainedModel]]:
    """The native classes of a model type, by the stock architecture whose checkpoints they read.

    Raises:
        UnsupportedModelError: there are none.
    """
    if model_type not in _MODULES:
        there = ", ".join(sorted(_MODULES))
        raise UnsupportedModelError(f"no native class for model type {model_type!r}; there are classes for {there}")
    declared = vars(import_module(_MODULES[model_type]))
    return {
        cls.stock_name: cls
        for cls in declared.values()
        if isinstance(cls, type) and issubclass(cls, LigerPreTrainedModel) and "stock_name" in vars(cls)
        if cls.__module__ == _MODULES[model_type] and getattr(cls.config_class, "model_type", None) == model_type
    }


def class_for(source: CheckpointFolder) -> type[LigerPreTrainedModel]:
    """The native class for a checkpoint, by its model type and architecture; without one, that of the language model.

    Raises:
        UnsupportedModelError: there is none.
    """
    classes = classes_of(source.model_type)
    endings = ("ForCausalLM", "ForConditionalGeneration")
    architecture = source.architecture or next(name for name in classes if name.endswith(endings))
    if architecture not in classes:
        raise UnsupportedModelError(
            f"{source.path}: no native class for architecture {architecture!r}; for model type {source.model_type!r} there are "
            f"classes for {', '.join(classes)}"
        )
    return classes[architecture]
