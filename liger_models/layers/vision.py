"""Layers of vision encoders."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.linear import PackedLinear, attach_parts, parts_of, runs_packed


class VisionAttention(nn.Module):
    """Attention in which every patch sees every other, with q, k and v packed into `qkv_proj`.

    The product itself is done by the attention function that the model passes in, as in LigerAttention. A subclass has the
    projection of the output, under its stock name, and calls it in `_output`.

    Args:
        hidden_size: width of input and output, a multiple of num_heads.
        num_heads: heads of queries, keys and values.
        scaling: factor on q k^T.
        dropout: probability of dropping an attention weight in training.
        bias: whether q, k and v have biases.
    """

    is_causal, num_key_value_groups = False, 1  # names of the interface

    def __init__(self, hidden_size: int, num_heads: int, *, scaling: float, dropout: float = 0.0, bias: bool = True):
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is no multiple of the number of heads, {num_heads}")
        self.head_dim, self.scaling, self.dropout = hidden_size // num_heads, scaling, dropout
        self.qkv_proj = PackedLinear(hidden_size, dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden_size), bias=bias)
        attach_parts(self, "qkv_proj")

    def forward(
        self, hidden_states: Tensor, *, attention_function: Callable, attention_mask: Any = None, **context: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[images, patches, hidden] -> the same, and the attention weights where the attention function has them."""
        query, key, value = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for projected in self._projected(hidden_states)
        )
        dropout = self.dropout if self.training else 0.0
        attended, weights = attention_function(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, is_causal=False, **context
        )
        return self._output(attended.reshape(hidden_states.shape)), weights

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        if runs_packed(self, self.qkv_proj):
            return self.qkv_proj(hidden_states).chunk(3, dim=-1)
        return tuple(part(hidden_states) for part in parts_of(self, self.qkv_proj))

    def _output(self, attended: Tensor) -> Tensor:
        raise NotImplementedError


class LigerVisionAttention(VisionAttention):
    """With the output's projection `out_proj`, which has a bias where q, k and v have. Arguments as of VisionAttention."""

    def __init__(self, hidden_size: int, num_heads: int, *, scaling: float, dropout: float = 0.0, bias: bool = True):
        super().__init__(hidden_size, num_heads, scaling=scaling, dropout=dropout, bias=bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=bias)

    def _output(self, attended: Tensor) -> Tensor:
        return self.out_proj(attended)


class LigerNormedVisionAttention(VisionAttention):
    """With norms over the whole width of queries and keys, and the output's projection `projection_layer`.

    Arguments as of VisionAttention, and:

    Args:
        query_norm, key_norm: modules [..., hidden] -> [..., hidden], torch.nn.Identity for none.
        projection_dropout: probability of dropping an element of the output in training.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        scaling: float,
        query_norm: nn.Module,
        key_norm: nn.Module,
        dropout: float = 0.0,
        projection_dropout: float = 0.0,
        bias: bool = True,
    ):
        super().__init__(hidden_size, num_heads, scaling=scaling, dropout=dropout, bias=bias)
        self.q_norm, self.k_norm = query_norm, key_norm
        self.projection_layer = nn.Linear(hidden_size, hidden_size)
        self.projection_dropout = nn.Dropout(projection_dropout)

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        query, key, value = super()._projected(hidden_states)
        return self.q_norm(query), self.k_norm(key), value

    def _output(self, attended: Tensor) -> Tensor:
        return self.projection_dropout(self.projection_layer(attended))


class LigerVisionMLP(nn.Module):
    """fc2(activation(fc1(x))).

    Args:
        hidden_size: width of input and output.
        intermediate_size: width between the layers.
        activation: the activation as a module or function.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.activation = activation
        self.fc1 = nn.Linear(hidden_size, intermediate_size)
        self.fc2 = nn.Linear(intermediate_size, hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(hidden_states)))


class LigerPatchEmbedding(nn.Module):
    """Non-overlapping patches of an image as vectors, with learned positions.

    Args:
        num_channels: colours.
        hidden_size: width of a patch's vector.
        image_size, patch_size: side lengths in pixels; there is a position for each patch of an image of this size.
    """

    def __init__(self, num_channels: int, hidden_size: int, *, image_size: int, patch_size: int):
        super().__init__()
        self.patch_embedding = nn.Conv2d(num_channels, hidden_size, kernel_size=patch_size, stride=patch_size)
        self.position_embedding = nn.Embedding((image_size // patch_size) ** 2, hidden_size)

    def forward(self, pixel_values: Tensor, interpolate_positions: bool = False) -> Tensor:
        """[images, channels, height, width] -> [images, patches, hidden], row by row.

        interpolate_positions: stretch the learned positions (bicubic) over an image of another size.
        """
        patches = self.patch_embedding(pixel_values.to(self.patch_embedding.weight.dtype))
        height, width = patches.shape[2:]
        positions = self.position_embedding.weight
        if interpolate_positions and (height * width != positions.shape[0] or height != width):
            positions = _interpolated(positions, height, width)
        return patches.flatten(2).transpose(1, 2) + positions


class LigerClassTokenEmbedding(nn.Module):
    """A class token followed by the non-overlapping patches of an image, with learned positions for both.

    Args:
        num_channels: colours.
        hidden_size: width of a token.
        image_size, patch_size: height and width in pixels; there is a position for each patch of an image of this size.
        has_mask_token: whether there is a token that stands for masked patches.
        has_positions: whether there are learned positions.
        dropout: probability of dropping an element in training.

    Source: InternVLVisionEmbeddings.
    """

    def __init__(
        self,
        num_channels: int,
        hidden_size: int,
        *,
        image_size: tuple[int, int],
        patch_size: tuple[int, int],
        has_mask_token: bool = False,
        has_positions: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        count = (image_size[0] // patch_size[0]) * (image_size[1] // patch_size[1])
        self.cls_token = nn.Parameter(torch.zeros(1, 1, hidden_size))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, hidden_size)) if has_mask_token else None
        self.patch_embeddings = LigerPatchProjection(num_channels, hidden_size, patch_size)
        self.position_embeddings = nn.Parameter(torch.zeros(1, count + 1, hidden_size)) if has_positions else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, pixel_values: Tensor, masked: Tensor | None = None) -> Tensor:
        """[images, channels, height, width] -> [images, 1 + patches, hidden], patches row by row.

        Learned positions are stretched (bicubic) over an image of another size.

        Args:
            masked: [images, patches], true where the mask token takes a patch's place.

        Raises:
            ValueError: `masked` without a mask token, or the wrong number of colours.
        """
        grid = self.patch_embeddings(pixel_values)
        patches = grid.flatten(2).transpose(1, 2)
        if masked is not None:
            if self.mask_token is None:
                raise ValueError("only a model with a mask token (use_mask_token in its configuration) can mask patches")
            patches = torch.where(masked.bool().unsqueeze(-1), self.mask_token, patches)
        tokens = torch.cat((self.cls_token.expand(patches.shape[0], -1, -1), patches), dim=1)
        if self.position_embeddings is not None:
            tokens = tokens + self._positions(*grid.shape[2:], is_square=pixel_values.shape[2] == pixel_values.shape[3])
        return self.dropout(tokens)

    def _positions(self, height: int, width: int, is_square: bool) -> Tensor:
        assert self.position_embeddings is not None
        if is_square and height * width + 1 == self.position_embeddings.shape[1]:
            return self.position_embeddings
        own, of_patches = self.position_embeddings[0, :1], self.position_embeddings[0, 1:]
        return torch.cat((own, _interpolated(of_patches, height, width))).unsqueeze(0)


class LigerPatchProjection(nn.Module):
    """Non-overlapping patches as vectors; a module of its own because the checkpoint's keys say so."""

    def __init__(self, num_channels: int, hidden_size: int, patch_size: tuple[int, int]):
        super().__init__()
        self.projection = nn.Conv2d(num_channels, hidden_size, kernel_size=patch_size, stride=patch_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """[images, channels, height, width] -> [images, hidden, rows, columns]."""
        channels = self.projection.in_channels
        if pixel_values.shape[1] != channels:
            raise ValueError(f"pixel_values of shape {tuple(pixel_values.shape)}: the model takes {channels} channels")
        return self.projection(pixel_values.to(self.projection.weight.dtype))


def _interpolated(positions: Tensor, height: int, width: int) -> Tensor:
    side = round(positions.shape[0] ** 0.5)
    grid = positions.unflatten(0, (side, side)).permute(2, 0, 1).unsqueeze(0)
    grid = nn.functional.interpolate(grid, size=(height, width), mode="bicubic", align_corners=False)
    return grid.squeeze(0).flatten(1).transpose(0, 1)


class LigerPoolingHead(nn.Module):
    """One vector for an image: a learned query attends to its patches, and a residual MLP follows.

    Args:
        hidden_size, num_heads, intermediate_size: sizes, as in the encoder.
        eps: of the layer norm.
        activation: the MLP's activation as a module or function.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        *,
        eps: float,
        activation: Callable[[Tensor], Tensor],
    ):
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, hidden_size))
        self.attention = nn.MultiheadAttention(hidden_size, num_heads, batch_first=True)
        self.layernorm = nn.LayerNorm(hidden_size, eps=eps)
        self.mlp = LigerVisionMLP(hidden_size, intermediate_size, activation=activation)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[images, patches, hidden] -> [images, hidden]."""
        probe = self.probe.expand(hidden_states.shape[0], -1, -1)
        attended, _ = self.attention(probe, hidden_states, hidden_states)
        return (attended + self.mlp(self.layernorm(attended)))[:, 0]
