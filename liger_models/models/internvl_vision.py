"""InternVL's vision encoder, InternViT, as a part of models that see images."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import InternVLVisionConfig, initialization
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from liger_models.conversions.internvl import VISION_MAPPING
from liger_models.layers.attention import eager_attention
from liger_models.layers.norm import LigerRMSNorm, add_norm
from liger_models.layers.vision import LigerClassTokenEmbedding, LigerNormedVisionAttention, LigerVisionMLP
from liger_models.pretrained import LigerPreTrainedModel

# The norms that a configuration can name. Both take a width and an `eps`.
_NORMS: dict[str, type[nn.Module]] = {"layer_norm": nn.LayerNorm, "rms_norm": LigerRMSNorm}


class LigerInternVLVisionBlock(GradientCheckpointingLayer):
    """Pre-norm attention and pre-norm MLP, each scaled per channel and added to the residual stream.

    Source: InternVLVisionLayer.
    """

    def __init__(self, config: InternVLVisionConfig):
        super().__init__()
        width = config.hidden_size
        norm = _norm_class(config.norm_type)
        self.attention = LigerNormedVisionAttention(
            width,
            config.num_attention_heads,
            scaling=(width // config.num_attention_heads) ** -0.5,
            query_norm=LigerRMSNorm(width, eps=1e-6) if config.use_qk_norm else nn.Identity(),
            key_norm=LigerRMSNorm(width, eps=1e-6) if config.use_qk_norm else nn.Identity(),
            dropout=config.attention_dropout,
            projection_dropout=config.projection_dropout,
            bias=config.attention_bias,
        )
        self.attention.config = config  # transformers' attention functions look for it there
        self.mlp = LigerVisionMLP(width, config.intermediate_size, activation=ACT2FN[config.hidden_act])
        self.layernorm_before = norm(width, eps=config.layer_norm_eps)
        self.layernorm_after = norm(width, eps=config.layer_norm_eps)
        self.lambda_1 = nn.Parameter(torch.full((width,), float(config.layer_scale_init_value)))
        self.lambda_2 = nn.Parameter(torch.full((width,), float(config.layer_scale_init_value)))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, **context: Any) -> Tensor:
        attended, _ = self.attention(self.layernorm_before(hidden_states), **context)
        normed, hidden_states = add_norm(self.layernorm_after, self.lambda_1 * attended, residual=hidden_states)
        return hidden_states + self.lambda_2 * self.dropout(self.mlp(normed))


def _norm_class(name: str) -> type[nn.Module]:
    if name not in _NORMS:
        raise ValueError(f"norm_type {name!r} of the vision configuration: there are {', '.join(_NORMS)}")
    return _NORMS[name]


class LigerInternVLVisionEncoder(nn.Module):
    """The stack of blocks; a module of its own because the checkpoint's keys say so."""

    def __init__(self, config: InternVLVisionConfig):
        super().__init__()
        self.layer = nn.ModuleList(LigerInternVLVisionBlock(config) for _ in range(config.num_hidden_layers))
        self.gradient_checkpointing = False

    def forward(self, hidden_states: Tensor, **context: Any) -> Tensor:
        for block in self.layer:
            hidden_states = block(hidden_states, **context)
        return hidden_states


class LigerInternVLVisionModel(LigerPreTrainedModel):
    """The vision encoder. Reads and writes InternVLVisionModel checkpoints."""

    config_class = InternVLVisionConfig
    stock_name = "InternVLVisionModel"
    checkpoint_mapping = VISION_MAPPING
    base_model_prefix = "internvl_vision"
    main_input_name = "pixel_values"
    input_modalities = ("image", "video")
    _no_split_modules: ClassVar[list[str]] = ["LigerInternVLVisionBlock", "LigerClassTokenEmbedding"]
    _can_record_outputs: ClassVar[dict[str, type]] = {
        "hidden_states": LigerInternVLVisionBlock,
        "attentions": LigerNormedVisionAttention,
    }

    def __init__(self, config: InternVLVisionConfig):
        super().__init__(config)
        self.embeddings = LigerClassTokenEmbedding(
            config.num_channels,
            config.hidden_size,
            image_size=tuple(config.image_size),
            patch_size=tuple(config.patch_size),
            has_mask_token=config.use_mask_token,
            has_positions=config.use_absolute_position_embeddings,
            dropout=config.hidden_dropout_prob,
        )
        self.encoder = LigerInternVLVisionEncoder(config)
        # The configuration means the mean that a classification head would take: it has a norm of its own then.
        final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layernorm = nn.Identity() if config.use_mean_pooling else final_norm
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.patch_embeddings

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None, **kwargs: Any) -> BaseModelOutputWithPooling:
        """The class token and the patches of images, encoded.

        Args:
            pixel_values: [images, channels, height, width].
            bool_masked_pos: [images, patches], true where the mask token takes a patch's place.

        Returns:
            `last_hidden_state` [images, 1 + patches, hidden].
        """
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        hidden_states = self.embeddings(pixel_values, bool_masked_pos)
        hidden_states = self.encoder(hidden_states, attention_function=function)
        return BaseModelOutputWithPooling(last_hidden_state=self.layernorm(hidden_states))

    def _init_weights(self, module: nn.Module) -> None:
        """As the stock class: tokens and positions of zero, and the configured scale of each sub-layer."""
        super()._init_weights(module)
        if isinstance(module, LigerClassTokenEmbedding):
            for parameter in (module.cls_token, module.mask_token, module.position_embeddings):
                if parameter is not None:
                    initialization.zeros_(parameter)
        elif isinstance(module, LigerInternVLVisionBlock):
            initialization.constant_(module.lambda_1, self.config.layer_scale_init_value)
            initialization.constant_(module.lambda_2, self.config.layer_scale_init_value)
