"""Packing and unpacking as invertible weight operations of transformers' loading machinery, shared by all families.

A family declares `packed("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj"))` once. Loading concatenates the parts' rows;
saving splits them again, by the sizes that the packed layer itself knows (with grouped key-value heads they are not equal,
so transformers' own Concatenate/Chunk pair would save wrong tensors without an error).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming


def packed(owner: str, packed_name: str, part_names: Sequence[str]) -> WeightConverter:
    """The mapping `<owner>.<part>.weight` (and `.bias`) for each part <-> `<owner>.<packed_name>.weight` (and `.bias`)."""
    # The look-ahead leaves an adapter's keys (`q_proj.lora_A.weight`) alone.
    sources = [rf"{owner}\.{part}(?=\.weight$|\.bias$)" for part in part_names]
    return WeightConverter(sources, f"{owner}.{packed_name}", operations=[PackRows(part_names)])


class PackRows(ConversionOps):
    """Parts' rows, one below the other, in the order of the declaration.

    Args:
        part_names: the parts' stock names.
    """

    def __init__(self, part_names: Sequence[str]):
        self.part_names = tuple(part_names)

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str,
        model: nn.Module,
        **_: Any,
    ) -> dict[str, Tensor]:
        """Concatenate the parts.

        Raises:
            ValueError: a part is absent or has a wrong shape, or the packed tensor is there too. Names the stock key.
        """
        module_name, _, kind = full_layer_name.rpartition(".")
        owner_name = module_name.rpartition(".")[0]
        layer = model.get_submodule(module_name)
        tensors = []
        for pattern, part, size in zip(source_patterns, layer.part_names, layer.part_sizes):
            key = f"{owner_name}.{part}.{kind}"
            if pattern not in input_dict:
                raise ValueError(f"missing key {key}: the checkpoint has other parts of {full_layer_name}")
            tensor = single(input_dict.pop(pattern))
            check_shape(key, tensor, (size,) if kind == "bias" else (size, layer.in_features))
            tensors.append(tensor)
        if input_dict:
            parts = ", ".join(layer.part_names)
            raise ValueError(f"unexpected key {full_layer_name}: the checkpoint has its parts too ({parts})")
        return {target_patterns[0]: torch.cat(tensors)}

    @property
    def reverse_op(self) -> ConversionOps:
        return UnpackRows(self.part_names)


class UnpackRows(ConversionOps):
    """A packed layer's rows, split into its parts."""

    def __init__(self, part_names: Sequence[str]):
        self.part_names = tuple(part_names)

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str,
        model: nn.Module,
        **_: Any,
    ) -> dict[str, Tensor]:
        (tensor,) = (single(value) for value in input_dict.values())
        owner = _owner(model, full_layer_name)
        layer = getattr(owner, source_patterns[0].rpartition(".")[2])
        if tensor.shape[0] != layer.out_features:
            raise ValueError(
                f"{full_layer_name}: {tensor.shape[0]} rows cannot be split into parts of {layer.part_sizes}; a "
                f"sharded state dict has to be gathered first"
            )
        return dict(zip(target_patterns, tensor.split(layer.part_sizes)))

    @property
    def reverse_op(self) -> ConversionOps:
        return PackRows(self.part_names)


def _owner(model: nn.Module, key: str) -> nn.Module:
    """The module on which a packed layer and its parts hang, by the key of either."""
    return model.get_submodule(native_key(model, key).rpartition(".")[0].rpartition(".")[0])


def native_key(model: nn.Module, key: str) -> str:
    """A key that an operation is given in saving, under the model's own names.

    transformers before 5.24 gives the key on disk (`language_model.model.layers.0.self_attn.q_proj.weight`): it renames before
    it unpacks. What loading renames then leads back to the model's own names; those it leaves alone.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    for conversion in conversions:
        if isinstance(conversion, WeightRenaming):
            key, _ = conversion.rename_source_key(key)
    return key


def check_shape(key: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless a checkpoint's tensor has the shape that the model needs."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"size mismatch for {key}: {tuple(tensor.shape)} in the checkpoint, {tuple(expected)} in the model")


def single(tensors: Tensor | list[Tensor]) -> Tensor:
    """The one tensor that transformers has collected for a key, in a list or not."""
    return tensors[0] if isinstance(tensors, list) else tensors
