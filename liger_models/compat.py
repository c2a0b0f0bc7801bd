"""Every difference between the supported versions of transformers (5.20 to 5.24), and nothing else."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast
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
