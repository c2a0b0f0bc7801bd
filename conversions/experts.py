"""Stacked experts as invertible weight operations: experts that a checkpoint has apart, and GPT-OSS's layout and MXFP4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from liger_models.conversions import mxfp4
from liger_models.conversions.packing import check_shape, native_key, single


def stacked(owner: str, name: str, part_names: tuple[str, ...]) -> WeightConverter:
    """The mapping `<owner>.<expert>.<part>.weight` for each expert and part <-> `<owner>.<name>`."""
    sources = [f"{owner}.*.{part}.weight" for part in part_names]
    return _NamingConverter(sources, f"{owner}.{name}", operations=[StackExperts()])


class _NamingConverter(WeightConverter):
    """Tells its first operation which of a checkpoint's keys it has collected: a pattern with `*` alone does not say which
    expert is missing."""

    __slots__ = ()

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        keys = getattr(self.operations[0], "keys", None)
        if keys is not None:
            keys.setdefault(source_pattern, []).append(source_key)
        super().add_tensor(target_key, source_key, source_pattern, future)


class StackExperts(ConversionOps):
    """Experts' rows in one tensor [experts, rows, columns], each expert's parts one below the other."""

    def __init__(self):
        self.keys: dict[str, list[str]] = {}

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], target_patterns: list[str], full_layer_name: str, model: nn.Module, **_: Any):
        """Stack the experts.

        Raises:
            ValueError: an expert is absent, there is one too many, or a shape is wrong. Names the stock key.
        """
        module_name, _, name = full_layer_name.rpartition(".")
        experts = model.get_submodule(module_name)
        places, inside = experts.rows(name), f".{module_name.rpartition('.')[2]}."
        found: dict[str, Tensor] = {}
        for pattern, tensors in input_dict.items():
            found.update(zip((key.rpartition(inside)[2] for key in self.keys[pattern]), tensors))
        problems = [f"missing key {module_name}.{key}" for key in places if key not in found]
        problems += [f"unexpected key {module_name}.{key}" for key in found if key not in places]
        columns = getattr(experts, name).shape[2]
        for key in places.keys() & found.keys():
            rows = places[key][1]
            there, here = tuple(found[key].shape), (rows.stop - rows.start, columns)
            if there != here:
                problems.append(f"size mismatch for {module_name}.{key}: {there} in the checkpoint, {here} in the model")
        if problems:
            raise ValueError("; ".join(problems))
        first = next(iter(found.values()))
        result = torch.empty(getattr(experts, name).shape, dtype=first.dtype, device=first.device)
        for key, (expert, rows) in places.items():
            result[expert, rows] = found.pop(key)
        return {target_patterns[0]: result}

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitExperts()


class SplitExperts(ConversionOps):
    """A stacked tensor's experts, each split into its parts."""

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        (tensor,) = (single(value) for value in input_dict.values())
        parts = zip(target_patterns, tensor.chunk(len(target_patterns), dim=1))
        # contiguous: a file holds each expert by itself
        return {
            pattern.replace("*", str(expert)): rows.contiguous() for pattern, part in parts for expert, rows in enumerate(part)
        }

    @property
    def reverse_op(self) -> ConversionOps:
        return StackExperts()


def laid_out(owner: str, stock_name: str, name: str) -> WeightConverter:
    """The mapping of one of GPT-OSS's stacked tensors: `<owner>.<stock_name>`, as it is or as MXFP4 blocks and scales, <->
    `<owner>.<name>`. The plain name stands first: what is saved is named after it."""
    sources = [rf"{owner}.{stock_name}(?!_)", f"{owner}.{stock_name}_blocks", f"{owner}.{stock_name}_scales"]
    return WeightConverter(sources if name.endswith("weight") else sources[0], f"{owner}.{name}", operations=[LayOutExperts()])


class LayOutExperts(ConversionOps):
    """Stock GPT-OSS experts, in a floating-point dtype or in MXFP4, in the native layout (see layers/moe.py)."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str,
        model: nn.Module,
        **_: Any,
    ) -> dict[str, Tensor]:
        """Dequantise, transpose, and part gate from up.

        Raises:
            ValueError: blocks without scales or scales without blocks, both formats at once, or a wrong shape.
        """
        module_name, _, name = full_layer_name.rpartition(".")
        experts = model.get_submodule(module_name)
        stock = f"{module_name}.{experts.stock_names[name]}"
        tensors = {pattern: single(value) for pattern, value in input_dict.items()}
        plain, blocks, scales = (tensors.get(pattern) for pattern in (*source_patterns, None, None)[:3])
        input_dict.clear()
        if plain is not None:
            if len(tensors) > 1:
                raise ValueError(f"unexpected key {stock}_blocks or {stock}_scales: the checkpoint has {stock} too")
            check_shape(stock, plain, experts.stock_shape(name))
            return {target_patterns[0]: experts.from_stock(name, plain)}
        for suffix, tensor in (("blocks", blocks), ("scales", scales)):
            if tensor is None:
                raise ValueError(f"missing key {stock}_{suffix}: the checkpoint has the other half of the MXFP4 weight")
        parameter = getattr(experts, name)
        rows, columns = parameter.shape[1:]
        check_shape(f"{stock}_blocks", blocks, (parameter.shape[0], rows, columns // mxfp4.BLOCK, mxfp4.BLOCK // 2))
        check_shape(f"{stock}_scales", scales, blocks.shape[:3])
        # transformers has cast them to the parameter's dtype, in which 0 to 255 are exact
        blocks, scales = (experts.from_quantised_stock(name, tensor.to(torch.uint8)) for tensor in (blocks, scales))
        experts.quantised_from[name] = mxfp4.Origin.of(blocks, scales)
        return {target_patterns[0]: mxfp4.dequantise(blocks, scales, parameter.dtype)}

    @property
    def reverse_op(self) -> ConversionOps:
        return StockExperts()


class StockExperts(ConversionOps):
    """Native GPT-OSS experts in the stock layout; in MXFP4 if the model is being saved so (`model.weight_format`)."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str,
        model: nn.Module,
        **_: Any,
    ) -> dict[str, Tensor]:
        """Put gate and up by turns and transpose, or quantise.

        Raises:
            WeightFormatError: a weight that has no MXFP4 form, because it is not finite or its rows are no whole blocks.
        """
        (tensor,) = (single(value) for value in input_dict.values())
        experts = model.get_submodule(native_key(model, full_layer_name).rpartition(".")[0])
        name = source_patterns[0].rpartition(".")[2]
        if model.weight_format != "mxfp4" or not name.endswith("weight"):
            return {target_patterns[0]: experts.to_stock(name, tensor)}
        try:
            blocks, scales = mxfp4.quantise(tensor, experts.quantised_from.get(name))
        except mxfp4.WeightFormatError as error:
            raise mxfp4.WeightFormatError(f"{full_layer_name} cannot be written as MXFP4: {error}") from error
        quantised = {f"{full_layer_name}_blocks": blocks, f"{full_layer_name}_scales": scales}
        return {key: experts.to_quantised_stock(name, part) for key, part in quantised.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        return LayOutExperts()
