"""The routed experts of a mixture: each token's feed-forward blocks, weighted and summed."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from liger_models.kernels.registry import contract

_TENSORS = ("x", "expert_weights", "gate_up_weight", "down_weight", "gate_up_bias", "down_bias")


@contract(differentiable=_TENSORS, autocast=tuple(name for name in _TENSORS if name != "expert_weights"))
def fused_moe(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """The sum over a token's experts `e` of its weight for `e` times that expert's gated feed-forward block.

    For a token `x` and an expert `e`, with `gate` and `up` the halves of `linear(x, gate_up_weight[e], gate_up_bias[e])`, and,
    where `limit` is given, with `min(gate, limit)` for `gate` and `up` clamped to [-limit, limit]:

        linear((up + up_offset) * gate * sigmoid(alpha * gate), down_weight[e], down_bias[e])

    The projections are rounded to the dtype of `x`, and so is the activation. The weighted sum is taken in fp32 (fp64 for an
    fp64 `x`) and rounded once. Clamping has the gradient of torch.clamp: zero outside the interval, one on its ends.

    Args:
        x: [tokens, hidden], floating point.
        expert_ids: [tokens, top_k], int64 or int32, each at least 0. An id of `experts` or more takes no part (expert
            parallelism marks other ranks' experts so), and its weight's gradient is zero. Ids are not checked.
        expert_weights: [tokens, top_k], floating point.
        gate_up_weight: [experts, 2 * intermediate, hidden], an expert's rows of the gate first, in the dtype of `x`.
        down_weight: [experts, hidden, intermediate], in the dtype of `x`.
        gate_up_bias: [experts, 2 * intermediate] or None.
        down_bias: [experts, hidden] or None.
        alpha: factor inside the sigmoid.
        limit: the largest gate and the largest size of an up value, or None.
        up_offset: what is added to the up value after clamping.

    Returns:
        [tokens, hidden] in the dtype of `x`.

    Raises:
        ValueError: sizes or dtypes that do not belong together.

    Differentiable in all floating-point tensors. An expert that no token chose gets zeros, like its part of every token's sum.
    Under torch.autocast all but `expert_weights` are cast like a linear layer's. The defaults equal Qwen3MoeExperts of
    transformers, `alpha=1.702, limit=7.0, up_offset=1.0` equal GptOssExperts with its weights' rows de-interleaved. Source:
    Shazeer et al. 2017, arXiv:1701.06538; OpenAI 2025, arXiv:2508.10925.
    """
    check_arguments(x, expert_ids, expert_weights, gate_up_weight, down_weight, gate_up_bias, down_bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    experts = zip(*(_each(t, gate_up_weight.shape[0]) for t in (gate_up_weight, down_weight, gate_up_bias, down_bias)))
    for index, (gate_up, down, gate_up_offset, down_offset) in enumerate(experts):
        token, weight = _routed(expert_ids, expert_weights, index)
        gate, up = linear(x[token], gate_up, gate_up_offset).chunk(2, dim=-1)
        y = linear(_activation(gate, up, alpha, limit, up_offset), down, down_offset)
        total.index_add_(0, token, y.to(wide) * weight.unsqueeze(1).to(wide))
    return total.to(x.dtype)


def _routed(expert_ids: Tensor, expert_weights: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """The tokens that chose an expert and their weights for it; all tokens while tracing, which needs sizes that do not depend
    on values: those that did not choose it have a weight of zero."""
    chosen = expert_ids == expert
    if torch.compiler.is_compiling():
        everyone = torch.arange(expert_ids.shape[0], device=expert_ids.device)
        return everyone, torch.where(chosen, expert_weights, 0.0).sum(dim=1)
    token, slot = chosen.nonzero(as_tuple=True)
    return token, expert_weights[token, slot]


def _each(tensor: Tensor | None, experts: int) -> tuple:
    # unbind has one gradient of the whole; indexing would make one of the whole for each expert
    return (None,) * experts if tensor is None else tensor.unbind()


def _activation(gate: Tensor, up: Tensor, alpha: float, limit: float | None, up_offset: float) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate, up, dtype = gate.to(wide), up.to(wide), gate.dtype
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + up_offset) * gate * torch.sigmoid(alpha * gate)).to(dtype)


def check_arguments(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> None:
    """Raise ValueError for sizes and dtypes that do not belong together."""
    if x.dim() != 2 or expert_ids.dim() != 2 or gate_up_weight.dim() != 3 or down_weight.dim() != 3:
        raise ValueError(
            f"fused_moe: x, expert_ids, gate_up_weight and down_weight have {x.dim()}, {expert_ids.dim()}, "
            f"{gate_up_weight.dim()} and {down_weight.dim()} dimensions, which must be 2, 2, 3 and 3: flatten the tokens, "
            "stack the experts"
        )
    hidden, (experts, _, intermediate) = x.shape[1], down_weight.shape
    expected = {
        "expert_ids": (expert_ids, (x.shape[0], expert_ids.shape[1])),
        "expert_weights": (expert_weights, (x.shape[0], expert_ids.shape[1])),
        "gate_up_weight": (gate_up_weight, (experts, 2 * intermediate, hidden)),
        "down_weight": (down_weight, (experts, hidden, intermediate)),
        "gate_up_bias": (gate_up_bias, (experts, 2 * intermediate)),
        "down_bias": (down_bias, (experts, hidden)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"fused_moe: {name} has the shape {tuple(tensor.shape)}, not {shape} as x {tuple(x.shape)} and down_weight "
                f"{tuple(down_weight.shape)} [experts, hidden, intermediate] need it"
            )
        if tensor is not None and name not in ("expert_ids", "expert_weights") and tensor.dtype != x.dtype:
            raise ValueError(f"fused_moe: {name} is {tensor.dtype} and x is {x.dtype}: cast one to the other's dtype")
    if expert_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"fused_moe: expert_ids are {expert_ids.dtype}; they must be int64 or int32")
    if not expert_weights.is_floating_point():
        raise ValueError(f"fused_moe: expert_weights are {expert_weights.dtype}; they must be floating point")
