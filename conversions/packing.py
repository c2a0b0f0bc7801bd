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
from transformers.core_model_loading import ConversionOps, WeightConverter


def packed(owner: str, packed_name: str, part_names: Sequence[str]) -> WeightConverter:
    """The mapping `<owner>.<part>.weight` (and `.bias`) for each part <-> `<owner>.<packed_name>.weight` (and `.bias`)."""
    # The look-ahead leaves an adapter's keys (`q_proj.lora_A.weight`) alone.
    sources = [rf"{owner}\.{part}(?=\.weight$|\.bias$)" for part in part_names]
    return WeightConverter(sources, f"{owner}.{packed_name}", operations=[PackRows()])


class PackRows(ConversionOps):
    """Parts' rows, one below the other, in the order of the declaration."""

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
            tensor = _single(input_dict.pop(pattern))
            expected = (size,) if kind == "bias" else (size, layer.in_features)
            if tuple(tensor.shape) != expected:
                raise ValueError(f"size mismatch for {key}: {tuple(tensor.shape)} in the checkpoint, {expected} in the model")
            tensors.append(tensor)
        if input_dict:
            parts = ", ".join(layer.part_names)
            raise ValueError(f"unexpected key {full_layer_name}: the checkpoint has its parts too ({parts})")
        return {target_patterns[0]: torch.cat(tensors)}

    @property
    def reverse_op(self) -> ConversionOps:
        return UnpackRows()


class UnpackRows(ConversionOps):
    """A packed layer's rows, split into its parts."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str,
        model: nn.Module,
        **_: Any,
    ) -> dict[str, Tensor]:
        (tensor,) = (_single(value) for value in input_dict.values())
        module_name = full_layer_name.rpartition(".")[0]  # the packed layer or its first part: both hang on the owner
        owner = _owner(model, module_name.rpartition(".")[0])
        layer = getattr(owner, source_patterns[0].rpartition(".")[2])
        if tensor.shape[0] != layer.out_features:
            raise ValueError(
                f"{full_layer_name}: {tensor.shape[0]} rows cannot be split into parts of {layer.part_sizes}; a "
                f"sharded state dict has to be gathered first"
            )
        return dict(zip(target_patterns, tensor.split(layer.part_sizes)))

    @property
    def reverse_op(self) -> ConversionOps:
        return PackRows()


def _owner(model: nn.Module, name: str) -> nn.Module:
    """The module of a name that may be the one on disk already: transformers before 5.24 renames before it unpacks.

    A disk name has other prefixes (`language_model.model.layers.0.self_attn` for `model.language_model.layers.0.self_attn`),
    so it means the module that shares its ending and most of its words.
    """
    modules = dict(model.named_modules())
    if name in modules:
        return modules[name]
    words = name.split(".")

    def likeness(other: str) -> tuple[int, int]:
        others = other.split(".")
        ending = next(
            (n for n, (a, b) in enumerate(zip(reversed(words), reversed(others))) if a != b), min(len(words), len(others))
        )
        return ending, len(set(words) & set(others))

    return modules[max(modules, key=likeness)]


def _single(tensors: Tensor | list[Tensor]) -> Tensor:
    return tensors[0] if isinstance(tensors, list) else tensors
