"""What every model that sees images shares: image tokens that features replace, and the language-modelling head above them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling
from transformers.utils import torch_compilable_check

from liger_models.compat import CACHE, IMAGE_FIELD, ImageFields, named_cache
from liger_models.decoder import LigerCausalLMOutput, LigerLanguageModelHead
from liger_models.pretrained import LigerPreTrainedModel


@dataclass
class LigerMultimodalModelOutput(ImageFields, BaseModelOutputWithPast):
    """Attributes as in the text model's output, and those of the images that the installed stock class returns."""


@dataclass
class LigerMultimodalCausalLMOutput(ImageFields, LigerCausalLMOutput):
    """Attributes as in the text model's output, and those of the images that the installed stock class returns."""


class LigerMultimodalModel(LigerPreTrainedModel):
    """A vision tower, a projector and a text model without a head. A family's class builds and runs them."""

    base_model_prefix = "model"
    unused_keys = frozenset({"lm_head.weight", "language_model.lm_head.weight"})  # the head, in either layout
    input_modalities = ("image", "text")
    _skip_keys_device_placement: ClassVar[list[str]] = [CACHE]

    language_model: nn.Module

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    def get_image_features(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """The tower's output for [images, channels, height, width]; `pooler_output` [images, tokens, hidden] are the tokens."""
        raise NotImplementedError

    def get_placeholder_mask(self, input_ids: Tensor | None, inputs_embeds: Tensor, image_features: Tensor) -> Tensor:
        """[batch, sequence, 1]: the tokens that image features replace.

        Raises:
            ValueError: there are more or fewer of them than features.
        """
        if input_ids is None:
            token = torch.full((), self.config.image_token_id, dtype=torch.long, device=inputs_embeds.device)
            placeholder = (inputs_embeds == self.get_input_embeddings()(token)).all(-1)
        else:
            placeholder = input_ids == self.config.image_token_id
        tokens, features = placeholder.sum(), image_features.shape[0] * image_features.shape[1]
        torch_compilable_check(
            tokens * inputs_embeds.shape[-1] == image_features.numel(),
            f"Image features and image tokens do not match, tokens: {tokens}, features: {features}",
        )
        return placeholder.unsqueeze(-1).to(inputs_embeds.device)

    def _images(
        self, pixel_values: Tensor | None, mm_encoder_outputs: dict[str, Any] | None, **options: Any
    ) -> BaseModelOutputWithPooling | None:
        """The tower's output, which the caller may have already; None without images."""
        if pixel_values is not None and mm_encoder_outputs is not None:
            raise ValueError("give pixel_values or mm_encoder_outputs, not both")
        images = (mm_encoder_outputs or {}).get("image")
        if images is None and pixel_values is not None:
            images = self.get_image_features(pixel_values, return_dict=True, **options)
        return images

    def _with_images(
        self, input_ids: Tensor | None, inputs_embeds: Tensor, images: BaseModelOutputWithPooling | None
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings in which the tokens of images are replaced by their features, and the features."""
        if images is None:
            return inputs_embeds, None
        features = images.pooler_output.to(inputs_embeds.device, inputs_embeds.dtype)
        placeholder = self.get_placeholder_mask(input_ids, inputs_embeds, features)
        return inputs_embeds.masked_scatter(placeholder, features), features


class LigerMultimodalForConditionalGeneration(LigerPreTrainedModel, LigerLanguageModelHead, GenerationMixin):
    """A model that sees images and its language-modelling head. A family's class has the forward, with its own arguments."""

    base_model_prefix = "model"
    input_modalities = ("image", "text")
    model_class: ClassVar[type[LigerMultimodalModel]]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    _skip_keys_device_placement: ClassVar[list[str]] = [CACHE]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_image_features(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """As get_image_features of the base model."""
        return self.model.get_image_features(pixel_values, **kwargs)

    def _with_head(
        self,
        *,
        labels: Tensor | None,
        logits_to_keep: int | Tensor,
        num_items_in_batch: int | Tensor | None,
        ignore_index: int,
        skip_logits: bool | None,
        return_logits: bool | None,
        return_token_accuracy: bool,
        return_predicted_tokens: bool,
        cache: Any,
        **inputs: Any,
    ) -> LigerMultimodalCausalLMOutput:
        """Run the base model on `inputs`, and the head on what it returns."""
        shift_labels = inputs.pop("shift_labels", None)
        outputs = self.model(return_dict=True, **named_cache(cache), **inputs)
        head = self._head_outputs(
            outputs,
            labels=labels,
            shift_labels=shift_labels,
            logits_to_keep=logits_to_keep,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            skip_logits=skip_logits,
            return_logits=return_logits,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
        return LigerMultimodalCausalLMOutput(**head, **{IMAGE_FIELD: outputs.get(IMAGE_FIELD)})
