"""SigLIP's vision tower, as a part of models that see images."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import SiglipVisionConfig, initialization
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from liger_models.conversions.siglip import MAPPING
from liger_models.layers.attention import eager_attention
from liger_models.layers.linear import PackedLinear
from liger_models.layers.vision import LigerPatchEmbedding, LigerPoolingHead, LigerVisionAttention, LigerVisionMLP
from liger_models.pretrained import LigerPreTrainedModel


class LigerSiglipBlock(GradientCheckpointingLayer):
    """Pre-norm attention and pre-norm MLP, each added to the residual stream. Source: SiglipEncoderLayer."""

    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = LigerVisionAttention(
            config.hidden_size,
            config.num_attention_heads,
            scaling=(config.hidden_size // config.num_attention_heads) ** -0.5,
            dropout=config.attention_dropout,
        )
        self.self_attn.config = config  # transformers' attention functions look for it there
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = LigerVisionMLP(config.hidden_size, config.intermediate_size, activation=ACT2FN[config.hidden_act])

    def forward(self, hidden_states: Tensor, **context: Any) -> Tensor:
        attended, _ = self.self_attn(self.layer_norm1(hidden_states), **context)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.layer_norm2(hidden_states))


class LigerSiglipEncoder(nn.Module):
    """The stack of blocks; a module of its own because the checkpoint's keys say so."""

    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        self.layers = nn.ModuleList(LigerSiglipBlock(config) for _ in range(config.num_hidden_layers))
        self.gradient_checkpointing = False

    def forward(self, hidden_states: Tensor, **context: Any) -> Tensor:
        for block in self.layers:
            hidden_states = block(hidden_states, **context)
        return hidden_states


class LigerSiglipVisionModel(LigerPreTrainedModel):
    """The vision tower. Reads and writes SiglipVisionModel checkpoints."""

    config_class = SiglipVisionConfig
    stock_name = "SiglipVisionModel"
    checkpoint_mapping = MAPPING
    base_model_prefix = "vision_model"
    main_input_name = "pixel_values"
    _no_split_modules: ClassVar[list[str]] = ["LigerSiglipBlock"]
    _can_record_outputs: ClassVar[dict[str, type]] = {
        "hidden_states": LigerSiglipBlock,
        "attentions": LigerVisionAttention,
    }

    def __init__(self, config: SiglipVisionConfig):
        super().__init__(config)
        self.embeddings = LigerPatchEmbedding(
            config.num_channels, config.hidden_size, image_size=config.image_size, patch_size=config.patch_size
        )
        self.encoder = LigerSiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if config.vision_use_head:
            self.head = LigerPoolingHead(
                config.hidden_size,
                config.num_attention_heads,
                config.intermediate_size,
                eps=config.layer_norm_eps,
                activation=ACT2FN[config.hidden_act],
            )
        self.uses_head = config.vision_use_head
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.patch_embedding

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: Tensor, interpolate_pos_encoding: bool | None = False, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Patches of images, encoded.

        Args:
            pixel_values: [images, channels, height, width].
            interpolate_pos_encoding: stretch the learned positions over images of another size.

        Returns:
            `last_hidden_state` [images, patches, hidden], and, with the head, `pooler_output` [images, hidden].
        """
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        hidden_states = self.embeddings(pixel_values, bool(interpolate_pos_encoding))
        hidden_states = self.post_layernorm(self.encoder(hidden_states, attention_function=function, **kwargs))
        pooled = self.head(hidden_states) if self.uses_head else None
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def _init_weights(self, module: nn.Module) -> None:
        """As the stock class: Xavier (Glorot and Bengio 2010) for attention and MLP, LeCun for the patches."""
        if isinstance(module, LigerVisionAttention):
            if not getattr(module.qkv_proj.weight, "_is_hf_initialized", False):  # the flag is not on its parts
                for rows in module.qkv_proj.weight.split(module.qkv_proj.part_sizes):
                    initialization.xavier_uniform_(rows)
            initialization.xavier_uniform_(module.out_proj.weight)
            initialization.zeros_(module.qkv_proj.bias)
            initialization.zeros_(module.out_proj.bias)
        elif isinstance(module, LigerVisionMLP):
            for layer in (module.fc1, module.fc2):
                initialization.xavier_uniform_(layer.weight)
                initialization.normal_(layer.bias, std=1e-6)
        elif isinstance(module, LigerPatchEmbedding):
            initialization.lecun_normal_(module.patch_embedding.weight)
            initialization.zeros_(module.patch_embedding.bias)
            initialization.normal_(module.position_embedding.weight, std=self.config.hidden_size**-0.5)
        elif isinstance(module, LigerPoolingHead):
            initialization.xavier_uniform_(module.probe)
            initialization.xavier_uniform_(module.attention.in_proj_weight)
            initialization.zeros_(module.attention.in_proj_bias)
            initialization.lecun_normal_(module.attention.out_proj.weight)
            initialization.zeros_(module.attention.out_proj.bias)
        elif not isinstance(module, PackedLinear):  # a packed layer is initialised with the attention that it belongs to
            super()._init_weights(module)
