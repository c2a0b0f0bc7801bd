"""The packed linear layer: several projections of one input, stored as one weight, with their stock names as views.

`attach_parts` gives the owner of a packed layer one module per part, under the part's stock name:

    self.qkv_proj = PackedLinear(hidden_size, {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024}, bias=False)
    attach_parts(self, "qkv_proj")       # self.q_proj, self.k_proj, self.v_proj

A part has no parameters of its own: its weight and bias are views of the packed ones. As long as every part is plain the
owner runs the packed product. Once something has wrapped a part (LoRA does), the owner runs the parts. So a list of target
modules, an adapter file or a checkpoint's keys mean what they mean on the stock model.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from liger_models.layers.plain import is_plain


class PackedLinear(nn.Module):
    """Linear projections of one input, their rows one below the other in a single weight.

    Args:
        in_features: width of the input.
        parts: output width of each part, by its stock name, in order.
        bias: whether the parts have biases.
    """

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool):
        super().__init__()
        self.in_features, self.out_features = in_features, sum(parts.values())
        self.part_names, self.part_sizes = tuple(parts), tuple(parts.values())
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features))
        self.bias = nn.Parameter(torch.empty(self.out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each part's initial distribution is that of a torch.nn.Linear."""
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]: the parts' outputs side by side."""
        return nn.functional.linear(hidden_states, self.weight, self.bias)

    def extra_repr(self) -> str:
        parts = ", ".join(f"{name}={size}" for name, size in zip(self.part_names, self.part_sizes))
        return f"in_features={self.in_features}, {parts}, bias={self.bias is not None}"


class PartLinear(nn.Linear):
    """One part of a packed layer: its weight [size, in_features] and bias [size] are views of the packed layer's."""

    # For transformers' initialisation: the packed layer is initialised, a part has nothing of its own.
    _is_hf_initialized = True

    def __init__(self, packed: PackedLinear, start: int, size: int):
        nn.Module.__init__(self)  # not nn.Linear's: it would make parameters
        self._packed = (packed,)  # in a tuple, so that it is not registered as a sub-module
        self._start, self.in_features, self.out_features = start, packed.in_features, size

    def _rows(self, name: str) -> Tensor | None:
        parameter = getattr(self._packed[0], name)
        return None if parameter is None else parameter.narrow(0, self._start, self.out_features)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return _PartView.of(self._packed[0].weight, self._start, self.out_features)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        bias = self._packed[0].bias
        return None if bias is None else _PartView.of(bias, self._start, self.out_features)

    def forward(self, input: Tensor) -> Tensor:
        weight = self._rows("weight")
        assert weight is not None
        return nn.functional.linear(input, weight, self._rows("bias"))


class _PartView(torch.Tensor):
    """Rows of a packed parameter that behave like a parameter for those who assign to `.data` or read `.grad`.

    PEFT merges an adapter by `layer.weight.data = merged`; on a plain view that would change the view and not the model.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    _source: tuple[Tensor, int, int]

    @classmethod
    def of(cls, parameter: Tensor, start: int, size: int) -> _PartView:
        view = parameter.narrow(0, start, size).as_subclass(cls)
        view._source = (parameter, start, size)
        return view

    def _rows_of(self, tensor: Tensor) -> Tensor:
        _, start, size = self._source
        return tensor.narrow(0, start, size)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self._rows_of(self._source[0].data)

    @data.setter
    def data(self, value: Tensor) -> None:
        self._rows_of(self._source[0].data).copy_(value)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._source[0].requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value != self.requires_grad:
            raise NotImplementedError(
                "the weight or bias of one part of a packed layer cannot be frozen or trained by itself: set requires_grad of "
                "the packed parameter (qkv_proj, gate_up_proj); with PEFT use bias='none' or bias='all'"
            )

    def requires_grad_(self, requires_grad: bool = True) -> _PartView:
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        gradient = self._source[0].grad
        return None if gradient is None else self._rows_of(gradient)


def attach_parts(owner: nn.Module, packed_name: str) -> None:
    """Give `owner` the parts of its packed layer as modules, and let its load_state_dict take the parts' stock keys."""
    packed = getattr(owner, packed_name)
    start = 0
    for name, size in zip(packed.part_names, packed.part_sizes):
        owner.add_module(name, PartLinear(packed, start, size))
        start += size
    owner.register_load_state_dict_pre_hook(partial(_pack_stock_keys, packed_name))


def parts_of(owner: nn.Module, packed: PackedLinear) -> list[nn.Module]:
    return [getattr(owner, name) for name in packed.part_names]


def runs_packed(owner: nn.Module, packed: PackedLinear) -> bool:
    """Whether calling the packed layer equals calling the owner's parts one by one: nothing has wrapped a part."""
    return all(is_plain(part, PartLinear) for part in parts_of(owner, packed))


def _pack_stock_keys(packed_name, owner, state_dict, prefix, metadata, strict, missing, unexpected, errors) -> None:
    """Replace the parts' keys in a state dict by the packed key. Parts that the state dict lacks keep their values."""
    packed: PackedLinear = getattr(owner, packed_name)
    for kind in ("weight", "bias"):
        parameter = getattr(packed, kind)
        keys = {name: f"{prefix}{name}.{kind}" for name in packed.part_names}
        found = {name: key for name, key in keys.items() if key in state_dict}
        if parameter is None or not found:
            continue
        tensors = {name: state_dict.pop(key) for name, key in found.items()}
        wrong = _wrong_shapes(packed, parameter, keys, tensors)
        if f"{prefix}{packed_name}.{kind}" in state_dict:
            wrong.append(f"the state dict has both {prefix}{packed_name}.{kind} and parts of it: {', '.join(found.values())}")
        errors.extend(wrong)
        missing.extend(key for name, key in keys.items() if name not in found)
        if wrong:
            continue
        if len(found) < len(keys) and parameter.is_meta:
            absent = ", ".join(key for name, key in keys.items() if name not in found)
            errors.append(f"{prefix}{packed_name}.{kind} is on the meta device and the state dict lacks {absent}")
            continue
        rows = parameter.detach().split(packed.part_sizes)
        parts = [tensors.get(name, old) for name, old in zip(packed.part_names, rows)]
        device = next(iter(tensors.values())).device
        state_dict[f"{prefix}{packed_name}.{kind}"] = torch.cat([part.to(device) for part in parts])


def _wrong_shapes(packed: PackedLinear, parameter: Tensor, keys: dict, tensors: dict) -> list[str]:
    sizes = dict(zip(packed.part_names, packed.part_sizes))
    wrong = []
    for name, tensor in tensors.items():
        expected = (sizes[name], *parameter.shape[1:])
        if tuple(tensor.shape) != expected:
            wrong.append(f"size mismatch for {keys[name]}: {tuple(tensor.shape)} in the state dict, {expected} in the model")
    return wrong
