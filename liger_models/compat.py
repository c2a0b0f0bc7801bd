"""Every difference between the supported versions of transformers (5.20 to 5.24), and nothing else."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

from transformers import modeling_outputs
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling
from transformers.utils import ModelOutput
from transformers.utils.versions import require_version

require_version("transformers>=5.20.0", "liger_models reads stock checkpoints through loading code that older versions lack.")

# The name under which a key-value cache travels: as an argument of models, layers and mask functions and as a field of
# outputs. 5.24 renamed it.
CACHE = "cache" if any(field.name == "cache" for field in fields(BaseModelOutputWithPast)) else "past_key_values"


def takes_cache(forward: Callable) -> Callable:
    """Let a forward that calls its parameter `cache` take the cache under either version's name.

    Its public signature shows the installed version's name, which `generate` looks for.
    """
    signature = inspect.signature(forward)
    parameters = [p.replace(name=CACHE) if p.name == "cache" else p for p in signature.parameters.values()]

    @wraps(forward)
    def renamed(*args, **kwargs):
        if "past_key_values" in kwargs:
            cache = kwargs.pop("past_key_values")
            if cache is not None:
                kwargs["cache"] = cache
        return forward(*args, **kwargs)

    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed


def named_cache(cache: Any) -> dict[str, Any]:
    """The cache as a keyword argument, or as an output's field, under the installed version's name."""
    return {CACHE: cache}


def update_cache(cache: Any, key: Any, value: Any, layer_index: int, context: dict[str, Any]) -> tuple[Any, Any]:
    """Append keys and values [batch, heads, sequence, head_dim] to the cache; what attention has to read comes back."""
    if CACHE == "cache":
        return cache.update(key, value, layer_index, kwargs=context)
    return cache.update(key, value, layer_index)


# What the outputs of a model that sees images say of them: 5.20 the image tokens, 5.24 the tower's whole output.
if hasattr(modeling_outputs, "MultimodalModelOutput"):

    @dataclass
    class ImageFields(modeling_outputs.MultimodalModelOutput):
        """image_outputs: the tower's output, whose `pooler_output` are the image tokens; None without images."""

        image_outputs: BaseModelOutputWithPooling | None = None

        @property
        def image_hidden_states(self) -> Any:
            """[images, tokens, hidden], or None: what older versions call the image tokens."""
            return None if self.image_outputs is None else self.image_outputs.pooler_output

else:

    @dataclass
    class ImageFields(ModelOutput):  # type: ignore[no-redef]
        """image_hidden_states: the image tokens [images, tokens, hidden]; None without images."""

        image_hidden_states: Any = None


IMAGE_FIELD = fields(ImageFields)[0].name


def image_fields(images: BaseModelOutputWithPooling | None, features: Any) -> dict[str, Any]:
    """What `ImageFields` takes, for the tower's output and its image tokens in the text model's dtype."""
    return {IMAGE_FIELD: images if IMAGE_FIELD == "image_outputs" else features}
