"""InternVL (`"model_type": "internvl"`, and OpenGVLab's original `"internvl_chat"`): InternViT, projector, and a text model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import InternVLConfig, InternVLVisionConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import can_return_tuple

from liger_models.compat import image_fields, named_cache, takes_cache
from liger_models.conversions.internvl import HEAD_MAPPING, MAPPING, ORIGINAL_LAYOUT, ungrouped_rows
from liger_models.conversions.internvl_chat import (
    has_grouped_rows,
    read_original,
    refuse_unsupported,
    translated_configuration,
)
from liger_models.decoder import LigerDecoderModel
from liger_models.layers.attention import LigerAttention
from liger_models.models.gpt_oss import LigerGptOssModel
from liger_models.models.internvl_vision import LigerInternVLVisionModel
from liger_models.models.llama import LigerLlamaModel
from liger_models.models.qwen2 import LigerQwen2Model
from liger_models.models.qwen3 import LigerQwen3Model
from liger_models.models.qwen3_moe import LigerQwen3MoeModel
from liger_models.multimodal import (
    LigerMultimodalCausalLMOutput,
    LigerMultimodalForConditionalGeneration,
    LigerMultimodalModel,
    LigerMultimodalModelOutput,
)
from liger_models.pretrained import HUB_OPTIONS, LigerPreTrainedModel

# For each model type of a text configuration its class.
TEXT_MODELS: dict[str, type[LigerDecoderModel]] = {
    "gpt_oss": LigerGptOssModel,
    "llama": LigerLlamaModel,
    "qwen2": LigerQwen2Model,
    "qwen3": LigerQwen3Model,
    "qwen3_moe": LigerQwen3MoeModel,
}


class LigerInternVLProjector(nn.Module):
    """Patches of the encoder -> tokens of the text model: squares of patches side by side, normalised, projected twice.

    Args:
        vision_size, text_size: widths of the encoder and of the text model.
        window: side of a square, in patches.
        activation: between the projections, as a module or function.

    Source: InternVLMultiModalProjector, and pixel_shuffle of InternVLModel.
    """

    def __init__(self, vision_size: int, text_size: int, *, window: int, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.window = window
        self.layer_norm = nn.LayerNorm(vision_size * window**2)
        self.linear_1 = nn.Linear(vision_size * window**2, text_size)
        self.act = activation
        self.linear_2 = nn.Linear(text_size, text_size)

    def forward(self, patches: Tensor) -> Tensor:
        """[images, patches, vision_size], the patches of square images row by row -> [images, tokens, text_size].

        Raises:
            ValueError: the patches make no square, or none that the windows divide.
        """
        side = round(patches.shape[1] ** 0.5)
        if side**2 != patches.shape[1] or side % self.window:
            raise ValueError(
                f"{patches.shape[1]} patches of an image cannot be joined in squares of {self.window} by {self.window}: give "
                f"square images with a multiple of {self.window} patches on a side"
            )
        # [images, rows, row in the window, columns, column in the window, vision_size]
        grid = patches.reshape(patches.shape[0], side // self.window, self.window, side // self.window, self.window, -1)
        joined = grid.transpose(2, 3).flatten(3).flatten(1, 2)
        return self.linear_2(self.act(self.linear_1(self.layer_norm(joined))))


class _ReadsOriginalLayout(LigerPreTrainedModel):
    """Loading from OpenGVLab's original checkpoints, beside stock ones."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """As LigerPreTrainedModel.from_pretrained. Besides stock checkpoints it reads the original ones (`InternVLChatModel`),
        without running code from them; they are saved in the stock layout.

        Raises:
            NotImplementedError: an original checkpoint with something that the stock class does not have.
        """
        source = pretrained_model_name_or_path
        options = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        given = kwargs.get("config")  # None, a path, or a configuration
        described = source if given is None or isinstance(given, PreTrainedConfig) else given
        original = None if described is None else read_original(described, options)
        if original is None:
            return super().from_pretrained(source, *model_args, **kwargs)
        refuse_unsupported(described, original)
        if described is not source or given is None:
            config, kwargs = translated_configuration(described, original, options, kwargs)
            kwargs["config"] = config
        kwargs["key_mapping"] = {**ORIGINAL_LAYOUT, **(kwargs.get("key_mapping") or {})}
        loaded = super().from_pretrained(source, *model_args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model._weight_conversions = None  # what saving would undo, back to the original layout
        if has_grouped_rows(original):
            _ungroup(model)
        return loaded


@torch.no_grad()
def _ungroup(model: nn.Module) -> None:
    """Bring the rows of the text model's packed projections, loaded as InternLM2 has them, into order."""
    for attention in (module for module in model.modules() if isinstance(module, LigerAttention)):
        for parameter in (attention.qkv_proj.weight, attention.qkv_proj.bias):
            if parameter is None:
                continue
            if parameter.is_meta:
                raise NotImplementedError(
                    "an original checkpoint with InternLM2 cannot be loaded with parts of it on the disk or the CPU: load it "
                    "without device_map or max_memory, save_pretrained it, and load that"
                )
            parameter.copy_(ungrouped_rows(parameter, attention.num_key_value_heads, attention.head_dim))


class LigerInternVLModel(_ReadsOriginalLayout, LigerMultimodalModel):
    """Vision encoder, projector and text model without a head. Reads and writes InternVLModel checkpoints."""

    config_class = InternVLConfig
    stock_name = "InternVLModel"
    checkpoint_mapping = MAPPING
    input_modalities = ("image", "text", "video")
    _no_split_modules: ClassVar[list[str]] = [
        name for model in (LigerInternVLVisionModel, *TEXT_MODELS.values()) for name in model._no_split_modules
    ]

    def __init__(self, config: InternVLConfig):
        super().__init__(config)
        vision, text = config.vision_config, config.text_config
        if not isinstance(vision, InternVLVisionConfig):
            raise ValueError(f"a vision encoder of type {vision.model_type!r}: LigerInternVLModel has one, 'internvl_vision'")
        if text.model_type not in TEXT_MODELS:
            there = ", ".join(TEXT_MODELS)
            raise ValueError(f"a text model of type {text.model_type!r}: LigerInternVLModel has {there}; use the stock class")
        self.vision_tower = LigerInternVLVisionModel(vision)
        self.multi_modal_projector = LigerInternVLProjector(
            vision.hidden_size,
            text.hidden_size,
            window=_window(config.downsample_ratio),
            activation=ACT2FN[config.projector_hidden_act],
        )
        self.language_model = TEXT_MODELS[text.model_type](text)
        self.post_init()

    @can_return_tuple
    def get_image_features(
        self,
        pixel_values: Tensor,
        vision_feature_layer: int | None = None,
        vision_feature_select_strategy: str | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """The encoder's output for [images, channels, height, width]; `pooler_output` [images, tokens, hidden] are the tokens.

        Args:
            vision_feature_layer: which of the encoder's hidden states is projected. Default: the configuration's.
            vision_feature_select_strategy: "default" leaves out the class token. Default: the configuration's.
        """
        layer = self.config.vision_feature_layer if vision_feature_layer is None else vision_feature_layer
        strategy = vision_feature_select_strategy or self.config.vision_feature_select_strategy
        if layer != -1:
            kwargs["output_hidden_states"] = True
        outputs = self.vision_tower(pixel_values=pixel_values, return_dict=True, **kwargs)
        patches = outputs.last_hidden_state if layer == -1 else outputs.hidden_states[layer]
        if strategy == "default":
            patches = patches[:, 1:]
        outputs.pooler_output = self.multi_modal_projector(patches)
        return outputs

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        vision_feature_layer: int | None = None,
        vision_feature_select_strategy: str | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> LigerMultimodalModelOutput:
        """Hidden states of the text model, its image tokens replaced by image features. Arguments and outputs as in the stock
        model.

        Args:
            pixel_values: [tiles, channels, height, width], the tiles of all images of all samples in their order.
            vision_feature_layer, vision_feature_select_strategy: as of get_image_features.
            mm_encoder_outputs: {"image": output of get_image_features} in place of pixel_values.

        Raises:
            ValueError: neither or both of input_ids and inputs_embeds, or of pixel_values and mm_encoder_outputs; or the
                image tokens do not match the features.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        images = self._images(
            pixel_values,
            mm_encoder_outputs,
            vision_feature_layer=vision_feature_layer,
            vision_feature_select_strategy=vision_feature_select_strategy,
        )
        inputs_embeds, features = self._with_images(input_ids, inputs_embeds, images)
        outputs = self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **named_cache(cache),
            **kwargs,
        )
        return LigerMultimodalModelOutput(**outputs, **image_fields(images, features))


def _window(downsample_ratio: float) -> int:
    """How many patches become one token, along a side."""
    window = int(1 / downsample_ratio) if downsample_ratio else 0
    if window < 1 or abs(window * downsample_ratio - 1) > 1e-6:
        raise ValueError(f"downsample_ratio {downsample_ratio}: patches are joined in squares, so it has to be 1, 1/2, 1/3, …")
    return window


class LigerInternVLForConditionalGeneration(_ReadsOriginalLayout, LigerMultimodalForConditionalGeneration):
    """InternVL with its language-modelling head. Reads and writes InternVLForConditionalGeneration checkpoints."""

    stock_name = "InternVLForConditionalGeneration"
    checkpoint_mapping = HEAD_MAPPING
    model_class = LigerInternVLModel
    input_modalities = ("image", "text", "video")

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        vision_feature_layer: int | None = None,
        vision_feature_select_strategy: str | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        image_sizes: Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        *,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = -100,
        skip_logits: bool | None = None,
        return_logits: bool | None = None,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        **kwargs: Any,
    ) -> LigerMultimodalCausalLMOutput:
        """Logits, loss, or both: LigerInternVLModel's arguments, and those of the text models' heads.

        Args:
            image_sizes: unused; the stock class takes it too.
        """
        return self._with_head(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            vision_feature_layer=vision_feature_layer,
            vision_feature_select_strategy=vision_feature_select_strategy,
            labels=labels,
            logits_to_keep=logits_to_keep,
            mm_encoder_outputs=mm_encoder_outputs,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            skip_logits=skip_logits,
            return_logits=return_logits,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
            **kwargs,
        )
