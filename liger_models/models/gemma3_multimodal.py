"""Gemma 3 with images (`"model_type": "gemma3"`): SigLIP tower, projector, and the text model of `gemma3.py`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Gemma3Config, PreTrainedConfig, initialization
from transformers.masking_utils import (
    blockwise_overlay,
    create_causal_mask,
    create_masks_for_generate,
    maybe_pad_block_sequence_ids,
    sliding_window_overlay,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import can_return_tuple

from liger_models.compat import CACHE, image_fields, named_cache, takes_cache
from liger_models.conversions.gemma3_multimodal import HEAD_MAPPING, MAPPING
from liger_models.layers.norm import gemma_norm
from liger_models.models.gemma3 import LigerGemma3Model
from liger_models.models.siglip import LigerSiglipVisionModel
from liger_models.multimodal import (
    LigerMultimodalCausalLMOutput,
    LigerMultimodalForConditionalGeneration,
    LigerMultimodalModel,
    LigerMultimodalModelOutput,
)


class LigerGemma3Projector(nn.Module):
    """Patches of the tower -> tokens of the text model: averaged over squares, normalised, projected.

    Args:
        vision_size, text_size: widths of the tower and of the text model.
        patches_per_side, tokens_per_side: of an image, before and after averaging.
        eps: of the norm.

    Source: Gemma3MultiModalProjector.
    """

    def __init__(self, vision_size: int, text_size: int, *, patches_per_side: int, tokens_per_side: int, eps: float):
        super().__init__()
        self.mm_input_projection_weight = nn.Parameter(torch.zeros(vision_size, text_size))
        self.mm_soft_emb_norm = gemma_norm(vision_size, eps=eps)
        self.patches_per_side, self.window = patches_per_side, patches_per_side // tokens_per_side

    def forward(self, patches: Tensor) -> Tensor:
        """[images, patches, vision_size] -> [images, tokens, text_size]."""
        grid = patches.transpose(1, 2).unflatten(2, (self.patches_per_side, self.patches_per_side))
        averaged = nn.functional.avg_pool2d(grid.contiguous(), self.window).flatten(2).transpose(1, 2)
        return (self.mm_soft_emb_norm(averaged) @ self.mm_input_projection_weight).type_as(patches)


class LigerGemma3MultimodalModel(LigerMultimodalModel):
    """Vision tower, projector and text model without a head. Reads and writes Gemma3Model checkpoints."""

    config_class = Gemma3Config
    stock_name = "Gemma3Model"
    checkpoint_mapping = MAPPING
    accepts_loss_kwargs = False  # as the stock class tells the Trainer
    _supports_flash_attn = False  # it has no mask in which the tokens of an image see each other
    _no_split_modules: ClassVar[list[str]] = ["LigerGemma3Block", "LigerSiglipBlock"]

    def __init__(self, config: Gemma3Config):
        super().__init__(config)
        vision, text = config.vision_config, config.text_config
        self.vision_tower = LigerSiglipVisionModel(vision)
        self.multi_modal_projector = LigerGemma3Projector(
            vision.hidden_size,
            text.hidden_size,
            patches_per_side=vision.image_size // vision.patch_size,
            tokens_per_side=int(config.mm_tokens_per_image**0.5),
            eps=vision.layer_norm_eps,
        )
        self.language_model = LigerGemma3Model(text)
        # The stock class makes the text model's masks itself, and those do not go by use_bidirectional_attention.
        self.language_model.mask_options = {}
        self.vocab_size = text.vocab_size
        self.post_init()

    @can_return_tuple
    def get_image_features(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """The tower's output for [images, channels, height, width]; `pooler_output` [images, tokens, hidden] are the tokens."""
        outputs = self.vision_tower(pixel_values=pixel_values, return_dict=True, **kwargs)
        outputs.pooler_output = self.multi_modal_projector(outputs.last_hidden_state)
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
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> LigerMultimodalModelOutput:
        """Hidden states of the text model, its image tokens replaced by image features. Arguments and outputs as in the stock
        model.

        Args:
            pixel_values: [images, channels, height, width], the images of all samples in their order.
            token_type_ids: [batch, sequence], 1 for image tokens: those of one image see each other in both directions.
            labels: unused; the stock model takes them too.
            mm_encoder_outputs: {"image": output of get_image_features} in place of pixel_values.

        Raises:
            ValueError: neither or both of input_ids and inputs_embeds, or of pixel_values and mm_encoder_outputs; or the
                image tokens do not match the features.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(self._within_vocabulary(input_ids))
        images = self._images(pixel_values, mm_encoder_outputs)
        inputs_embeds, features = self._with_images(input_ids, inputs_embeds, images)
        if use_cache is None and self.training:
            use_cache = False  # as in the text model
        if token_type_ids is not None and not isinstance(attention_mask, dict):
            attention_mask = image_masks(
                self.config.get_text_config(), inputs_embeds, attention_mask, cache, position_ids, token_type_ids
            )
        outputs = self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **named_cache(cache),
            **kwargs,
        )
        return LigerMultimodalModelOutput(**outputs, **image_fields(images, features))

    def _within_vocabulary(self, input_ids: Tensor) -> Tensor:
        token = self.config.image_token_id
        return input_ids if token < self.vocab_size else input_ids.masked_fill(input_ids == token, 0)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LigerGemma3Projector):
            initialization.zeros_(module.mm_input_projection_weight)
        else:
            super()._init_weights(module)


def image_masks(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Any,
    position_ids: Tensor | None,
    token_type_ids: Tensor,
) -> dict[str, Any]:
    """For each kind of layer its mask: causal or both tokens of one image; in sliding layers also less than a window apart."""
    shared = {
        "config": config,
        "inputs_embeds": inputs_embeds,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        **named_cache(cache),
    }
    images = _image_of_each_token(token_type_ids.to(inputs_embeds.device))
    sliding = list(getattr(cache, "is_sliding", None) or ())
    layer = sliding.index(True) if True in sliding else 0
    keys, offset = (inputs_embeds.shape[1], 0) if cache is None else cache.get_mask_sizes(inputs_embeds.shape[1], layer)
    return {
        "full_attention": create_causal_mask(**shared, block_sequence_ids=images),
        "sliding_attention": create_causal_mask(
            **shared,
            or_mask_function=blockwise_overlay(maybe_pad_block_sequence_ids(images, attention_mask, keys, offset)),
            and_mask_function=sliding_window_overlay(config.sliding_window),
            layer_idx=layer,
        ),
    }


def _image_of_each_token(token_type_ids: Tensor) -> Tensor:
    """[batch, sequence]: the number of the image that a token belongs to, -1 for text."""
    is_image = token_type_ids == 1
    begins = is_image & ~nn.functional.pad(is_image, (1, 0), value=False)[:, :-1]
    return torch.where(is_image, begins.int().cumsum(1) - 1, -1)


class LigerGemma3ForConditionalGeneration(LigerMultimodalForConditionalGeneration):
    """Gemma 3 with images and its language-modelling head. Reads and writes Gemma3ForConditionalGeneration checkpoints."""

    stock_name = "Gemma3ForConditionalGeneration"
    checkpoint_mapping = HEAD_MAPPING
    model_class = LigerGemma3MultimodalModel
    _supports_flash_attn = False

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
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
        """Logits, loss, or both: LigerGemma3MultimodalModel's arguments, and those of the text models' heads."""
        return self._with_head(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
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

    def prepare_inputs_for_generation(self, input_ids, use_cache=True, is_first_iteration=False, **kwargs):
        """transformers' own, with token types in the first step only: later tokens belong to no image."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, use_cache=use_cache, is_first_iteration=is_first_iteration, **kwargs
        )
        inputs["token_type_ids"] = kwargs.get("token_type_ids") if is_first_iteration or not use_cache else None
        return inputs

    @staticmethod
    def create_masks_for_generate(
        config: PreTrainedConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The masks that generate prepares for caches that are compiled."""
        text, cache = config.get_text_config(), kwargs.get(CACHE)
        if token_type_ids is not None:
            return image_masks(text, inputs_embeds, attention_mask, cache, position_ids, token_type_ids)
        return create_masks_for_generate(
            config=text,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **named_cache(cache),
        )
