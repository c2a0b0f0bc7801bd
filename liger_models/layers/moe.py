"""Mixtures of experts: routers, the experts' stacked weights, and the loss that balances their load."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_models import ops


class LigerSoftmaxTopKRouter(nn.Module):
    """Softmax over all experts in fp32, then the k largest: Qwen3MoeTopKRouter's order and rounding.

    Args:
        hidden_size: width of the input.
        num_experts: how many experts there are.
        top_k: how many of them a token goes to.
        normalise: scale the k weights so that they add up to 1.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, *, normalise: bool):
        super().__init__()
        self.top_k, self.normalise = top_k, normalise
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, hidden] -> logits [tokens, experts], weights [tokens, top_k] in the logits' dtype, ids [tokens, top_k]."""
        logits = nn.functional.linear(hidden_states, self.weight)
        weights, ids = torch.topk(nn.functional.softmax(logits, dim=-1, dtype=torch.float32), self.top_k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), ids


class LigerTopKSoftmaxRouter(nn.Module):
    """The k largest logits, then softmax over these, in the logits' dtype: GptOssTopKRouter's order and rounding.

    Args:
        hidden_size: width of the input.
        num_experts: how many experts there are.
        top_k: how many of them a token goes to.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, hidden] -> logits [tokens, experts], weights [tokens, top_k] in the logits' dtype, ids [tokens, top_k]."""
        logits = nn.functional.linear(hidden_states, self.weight, self.bias)
        largest, ids = torch.topk(logits, self.top_k, dim=-1)
        return logits, nn.functional.softmax(largest, dim=-1, dtype=largest.dtype), ids


class LigerExperts(nn.Module):
    """SwiGLU experts in one weight each: down(silu(gate(x)) * up(x)). Names and layout of the stock module in memory.

    Its load_state_dict takes a checkpoint's keys too, which has the experts apart (`0.gate_proj.weight`).

    Args:
        num_experts: how many experts there are.
        hidden_size: width of input and output.
        intermediate_size: width of an expert's gate and up.
    """

    #: For each parameter the checkpoint's layers, of every expert, whose rows it holds, one below the other.
    part_names: ClassVar[dict[str, tuple[str, ...]]] = {
        "gate_up_proj": ("gate_proj", "up_proj"),
        "down_proj": ("down_proj",),
    }

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.register_load_state_dict_pre_hook(_stack_stock_keys)

    def forward(self, hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """[tokens, hidden], [tokens, top_k], [tokens, top_k] -> [tokens, hidden]."""
        return ops.fused_moe(hidden_states, expert_ids, expert_weights, self.gate_up_proj, self.down_proj)

    def stock_keys(self, name: str) -> list[str]:
        """The checkpoint's keys, below this module, of what the parameter `name` holds."""
        return list(self.rows(name))

    def rows(self, name: str) -> dict[str, tuple[int, slice]]:
        """For each of the checkpoint's keys of a parameter, the expert and the rows of it."""
        parts = self.part_names[name]
        size = getattr(self, name).shape[1] // len(parts)
        return {
            f"{expert}.{part}.weight": (expert, slice(index * size, (index + 1) * size))
            for expert in range(self.num_experts)
            for index, part in enumerate(parts)
        }


def _stack_stock_keys(experts, state_dict, prefix, metadata, strict, missing, unexpected, errors) -> None:
    """Replace a checkpoint's keys in a state dict by the stacked ones. Experts that the state dict lacks keep their values."""
    for name in experts.part_names:
        places = experts.rows(name)
        found = {key: state_dict.pop(prefix + key) for key in places if prefix + key in state_dict}
        if not found:
            continue
        parameter = getattr(experts, name)
        absent = [key for key in places if key not in found]
        missing.extend(prefix + key for key in absent)
        stacked = _empty_or_copy(parameter, next(iter(found.values())), keep=bool(absent))
        for key, tensor in found.items():
            expert, rows = places[key]
            target = stacked[expert, rows]
            if tensor.shape != target.shape:
                there, here = tuple(tensor.shape), tuple(target.shape)
                errors.append(f"size mismatch for {prefix}{key}: {there} in the state dict, {here} in the model")
                continue
            target.copy_(tensor)
        state_dict[prefix + name] = stacked


def _empty_or_copy(parameter: Tensor, like: Tensor, *, keep: bool) -> Tensor:
    """A tensor of the parameter's shape and the other's dtype and device, with the parameter's values if they are kept."""
    if keep and not parameter.is_meta:
        return parameter.detach().to(device=like.device, dtype=like.dtype, copy=True)
    return torch.empty(parameter.shape, dtype=like.dtype, device=like.device)


class LigerClampedExperts(nn.Module):
    """GPT-OSS's experts: biases, and down((clamp(up) + 1) * clamp(gate) * sigmoid(alpha * clamp(gate))).

    The stock module has the weights' dimensions the other way round, and the rows of gate and up by turns. As hidden and
    intermediate size may be equal, shapes do not tell the two layouts apart: so the parameters have names of their own, and
    load_state_dict takes the stock names too.

    Args:
        num_experts: how many experts there are.
        hidden_size: width of input and output.
        intermediate_size: width of an expert's gate and up.
        alpha: factor inside the sigmoid.
        limit: the largest gate and the largest size of an up value.
    """

    #: For each parameter the stock module's.
    stock_names: ClassVar[dict[str, str]] = {
        "gate_up_weight": "gate_up_proj",
        "gate_up_bias": "gate_up_proj_bias",
        "down_weight": "down_proj",
        "down_bias": "down_proj_bias",
    }

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, *, alpha: float, limit: float):
        super().__init__()
        self.alpha, self.limit = alpha, limit
        #: For each parameter that was loaded from MXFP4 what quantising it again needs (see conversions/mxfp4.py).
        self.quantised_from: dict[str, Any] = {}
        self.gate_up_weight = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size))
        self.down_weight = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_load_state_dict_pre_hook(_lay_out_stock_keys)

    def forward(self, hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """[tokens, hidden], [tokens, top_k], [tokens, top_k] -> [tokens, hidden]."""
        weights = (self.gate_up_weight, self.down_weight, self.gate_up_bias, self.down_bias)
        return ops.fused_moe(hidden_states, expert_ids, expert_weights, *weights, self.alpha, self.limit, 1.0)

    def stock_keys(self, name: str) -> list[str]:
        """The checkpoint's keys, below this module, of what the parameter `name` holds."""
        return [self.stock_names[name]]

    def stock_shape(self, name: str) -> tuple[int, ...]:
        """The shape that a parameter has in the stock module."""
        experts, *rest = getattr(self, name).shape
        return (experts, *reversed(rest))

    @classmethod
    def from_stock(cls, name: str, tensor: Tensor) -> Tensor:
        """A stock tensor in the layout of the parameter `name`."""
        return cls.from_quantised_stock(name, tensor.transpose(1, 2) if tensor.dim() == 3 else tensor).contiguous()

    @staticmethod
    def from_quantised_stock(name: str, tensor: Tensor) -> Tensor:
        """Stock MXFP4 blocks or scales [experts, rows, ...] in the row order of the parameter `name`."""
        return rows_in_halves(tensor) if name.startswith("gate_up") else tensor

    @staticmethod
    def to_quantised_stock(name: str, tensor: Tensor) -> Tensor:
        """Blocks or scales of the parameter `name` in the stock row order."""
        return rows_by_turns(tensor) if name.startswith("gate_up") else tensor

    @classmethod
    def to_stock(cls, name: str, tensor: Tensor) -> Tensor:
        """The parameter `name` in the layout of the stock tensor."""
        tensor = cls.to_quantised_stock(name, tensor)
        return (tensor.transpose(1, 2) if tensor.dim() == 3 else tensor).contiguous()


def _lay_out_stock_keys(experts, state_dict, prefix, metadata, strict, missing, unexpected, errors) -> None:
    """Replace stock keys in a state dict by the native ones."""
    for name, stock_name in experts.stock_names.items():
        if prefix + stock_name not in state_dict:
            continue
        tensor, expected = state_dict.pop(prefix + stock_name), experts.stock_shape(name)
        if tuple(tensor.shape) != expected:
            there = tuple(tensor.shape)
            errors.append(f"size mismatch for {prefix}{stock_name}: {there} in the state dict, {expected} in the model")
            continue
        state_dict[prefix + name] = experts.from_stock(name, tensor)


def rows_in_halves(tensor: Tensor) -> Tensor:
    """[experts, 2 * n, ...] with rows of gate and up by turns -> the gate's rows first."""
    return torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1)


def rows_by_turns(tensor: Tensor) -> Tensor:
    """[experts, 2 * n, ...] with the gate's rows first -> rows of gate and up by turns."""
    return torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)


def load_balancing_loss(router_logits: Sequence[Tensor], top_k: int, attention_mask: Tensor | None = None) -> Tensor:
    """experts * sum over experts of (share of choices) * (mean probability): smallest when all experts are used equally.

    Args:
        router_logits: for each layer [tokens, experts].
        top_k: how many experts a token goes to.
        attention_mask: [batch, sequence] with batch * sequence = tokens: the weight of each token, 0 for padding; or None.

    Returns:
        [] in fp32. Differentiable in the logits, by the probabilities.

    Source: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6; equals load_balancing_loss_func of transformers.
    """
    first = router_logits[0]
    experts, device = first.shape[-1], first.device
    if attention_mask is None:
        counted = torch.ones(first.shape[0], dtype=torch.float32, device=device)
    else:
        counted = attention_mask.reshape(-1).to(device=device, dtype=torch.float32)
    choices = torch.zeros(experts, dtype=torch.float32, device=device)
    probability = torch.zeros(experts, dtype=torch.float32, device=device)
    for logits in router_logits:
        probabilities = nn.functional.softmax(logits.to(device), dim=-1)
        chosen = torch.topk(probabilities, top_k, dim=-1).indices
        choices = choices.scatter_add(0, chosen.reshape(-1), counted.repeat_interleave(top_k))
        probability = probability + (probabilities.float() * counted.unsqueeze(-1)).sum(dim=0)
    tokens = counted.sum() * len(router_logits)
    return experts * (choices / tokens * (probability / tokens)).sum()
