"""The configuration of OpenGVLab's original InternVL checkpoints (`"model_type": "internvl_chat"`), as the stock one."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, InternVLConfig
from transformers.utils import cached_file, logging

logger = logging.get_logger(__name__)

ORIGINAL_TYPE = "internvl_chat"

# The original's configuration of the encoder: our name, and what the original takes if the name is not there.
_VISION_OPTIONS = {
    "num_channels": ("num_channels", 3),
    "patch_size": ("patch_size", 14),
    "image_size": ("image_size", 224),
    "qkv_bias": ("attention_bias", False),
    "hidden_size": ("hidden_size", 3200),
    "num_attention_heads": ("num_attention_heads", 25),
    "intermediate_size": ("intermediate_size", 12800),
    "qk_normalization": ("use_qk_norm", True),
    "num_hidden_layers": ("num_hidden_layers", 48),
    "hidden_act": ("hidden_act", "gelu"),
    "norm_type": ("norm_type", "rms_norm"),
    "layer_norm_eps": ("layer_norm_eps", 1e-6),
    "dropout": ("projection_dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "initializer_range": ("initializer_range", 0.02),
    "initializer_factor": ("layer_scale_init_value", 0.1),
}
# The text models whose original layout is read: the model type that they become, and the id of the token that image features
# replace where the checkpoint has no tokenizer to look it up in (as in the checkpoints that OpenGVLab converted).
_TEXT_TYPES: dict[str | None, tuple[str, int | None]] = {
    "LlamaForCausalLM": ("llama", 92546),
    "InternLM2ForCausalLM": ("llama", 92546),
    "Qwen2ForCausalLM": ("qwen2", 151667),
    "Qwen3ForCausalLM": ("qwen3", 151671),
    "Qwen3MoeForCausalLM": ("qwen3_moe", 151671),
    "GptOssForCausalLM": ("gpt_oss", None),
}
_IMAGE_TOKEN = "<IMG_CONTEXT>"
# Legacy names that text configurations take beside their fields, and fields that say nothing of the architecture (training
# scripts have left the cache off).
_TEXT_LEGACY = {"rope_theta", "rope_scaling"}
_TEXT_IGNORED = {"architectures", "transformers_version", "dtype", "use_cache", "return_dict"}


def read_original(source: Any, options: dict[str, Any]) -> dict[str, Any] | None:
    """The original's config.json in a directory or hub id; None where there is another or none.

    Args:
        options: which revision of it, as transformers takes it.
    """
    path = cached_file(source, "config.json", _raise_exceptions_for_missing_entries=False, **options)
    found = {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    return found if found.get("model_type") == ORIGINAL_TYPE else None


def has_grouped_rows(original: dict[str, Any]) -> bool:
    """Whether the text model's packed projections are to be brought into order by ungrouped_rows."""
    return _text_architecture(original) == "InternLM2ForCausalLM"


def refuse_unsupported(source: Any, original: dict[str, Any]) -> None:
    """Refuse what no configuration could make right.

    Raises:
        NotImplementedError: the original does something that the stock class does not.
    """
    version = original.get("ps_version", "v1")
    if version != "v2":
        raise NotImplementedError(
            f"{source}: ps_version {version!r} joins patches in transposed order, and the stock class has no such order. Only "
            f"'v2' (InternVL 2 and later) is supported"
        )
    if original.get("quantization_config"):
        raise NotImplementedError(f"{source}: quantised weights are not read in the original layout; take the unquantised ones")
    adapters = [name for name in ("use_backbone_lora", "use_llm_lora") if original.get(name)]
    if adapters:
        raise NotImplementedError(f"{source}: {', '.join(adapters)}: merge the adapters and save the model without them first")


def translated_configuration(
    source: Any, original: dict[str, Any], options: dict[str, Any], overrides: dict[str, Any]
) -> tuple[InternVLConfig, dict[str, Any]]:
    """The stock configuration for an original checkpoint. Code that comes with the checkpoint is not run.

    Args:
        source: directory or hub id.
        original: its config.json.
        options: which revision of it, as transformers takes it.
        overrides: options of the stock configuration, and others, which come back.

    Raises:
        NotImplementedError: the original does something that the stock class does not.
    """
    model_type, usual_token = _text_type(source, original)
    token = overrides.get("image_token_id") or original.get("image_token_id") or _image_token(source, options)
    if token is None and usual_token is None:
        raise NotImplementedError(
            f"{source} has no tokenizer that knows {_IMAGE_TOKEN}: give image_token_id=... to from_pretrained"
        )
    if token is None:
        logger.warning(
            f"{source} has no tokenizer that knows {_IMAGE_TOKEN}; its id is taken to be {usual_token}. If it is another, give "
            f"image_token_id=... to from_pretrained."
        )
    translated = {
        **_model_options(source, original),
        "text_config": _text_options(model_type, original["llm_config"]),
        "image_token_id": usual_token if token is None else token,
    }
    own = {field.name for field in fields(InternVLConfig)} - {"dtype"}  # transformers' loading wants that one itself
    config = InternVLConfig(**{**translated, **{name: value for name, value in overrides.items() if name in own}})
    return config, {name: value for name, value in overrides.items() if name not in own}


def _model_options(source: Any, original: dict[str, Any]) -> dict[str, Any]:
    """The stock configuration's options beside those of its text model."""
    vision = _vision_options(source, original.get("vision_config") or {})
    ratio = original.get("downsample_ratio", 0.5)
    patches = (original.get("force_image_size") or vision["image_size"]) // vision["patch_size"]
    return {
        "vision_config": vision,
        "downsample_ratio": ratio,
        "image_seq_length": int(patches**2 * ratio**2),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": original.get("select_layer", -1),
        "tie_word_embeddings": bool((original.get("llm_config") or {}).get("tie_word_embeddings", False)),
        "dtype": original.get("dtype") or original.get("torch_dtype"),
    }


def _vision_options(source: Any, original: dict[str, Any]) -> dict[str, Any]:
    vision = {ours: original.get(theirs, default) for theirs, (ours, default) in _VISION_OPTIONS.items()}
    if vision["use_qk_norm"] and vision["layer_norm_eps"] != 1e-6:
        raise NotImplementedError(
            f"{source}: norms of queries and keys with an epsilon of {vision['layer_norm_eps']}; the stock class has 1e-6 there"
        )
    if original.get("drop_path_rate"):
        logger.warning(
            f"{source}: drop_path_rate {original['drop_path_rate']} has no effect: like the stock class, this one drops no "
            f"layers in training"
        )
    return vision


def _text_architecture(original: dict[str, Any]) -> str | None:
    return ((original.get("llm_config") or {}).get("architectures") or [None])[0]


def _text_type(source: Any, original: dict[str, Any]) -> tuple[str, int | None]:
    architecture = _text_architecture(original)
    if architecture not in _TEXT_TYPES:
        there = ", ".join(map(str, _TEXT_TYPES))
        raise NotImplementedError(
            f"{source}: a text model of class {architecture}, whose original layout is not read (those of "
            f"{there} are). Take the checkpoint that OpenGVLab publishes with the ending -hf, or convert it "
            f"with convert_internvl_weights_to_hf.py of transformers"
        )
    return _TEXT_TYPES[architecture]


def _text_options(model_type: str, original: dict[str, Any]) -> dict[str, Any]:
    configuration = CONFIG_MAPPING[model_type]
    aliases = {name for pair in configuration.attribute_map.items() for name in pair}
    known = {*(field.name for field in fields(configuration)), *aliases} - _TEXT_IGNORED
    options = {name: value for name, value in original.items() if name in known | _TEXT_LEGACY}
    if has_grouped_rows({"llm_config": original}):
        options["attention_bias"] = original.get("bias", True)
    return {**options, "model_type": model_type}


def _image_token(source: Any, options: dict[str, Any]) -> int | None:
    """The id of the token that image features replace, from whichever file of the tokenizer names it."""
    for name, ids in _TOKENIZER_FILES.items():
        path = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **options)
        found = None if path is None else ids(json.loads(Path(path).read_text(encoding="utf-8"))).get(_IMAGE_TOKEN)
        if found is not None:
            return int(found)
    return None


# For each file the ids of the added tokens that it holds.
_TOKENIZER_FILES = {
    "added_tokens.json": lambda content: content,
    "tokenizer_config.json": lambda content: {
        token["content"]: number for number, token in content.get("added_tokens_decoder", {}).items()
    },
    "tokenizer.json": lambda content: {token["content"]: token["id"] for token in content.get("added_tokens", [])},
}
