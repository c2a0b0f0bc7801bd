"""The whole gated feed-forward block, which recomputes its activation in backward."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from liger_models.kernels.registry import contract

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}
_TENSORS = ("x", "gate_up_weight", "down_weight", "gate_up_bias", "down_bias")


@contract(differentiable=_TENSORS, autocast=_TENSORS)
def gated_mlp(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """`linear(act(gate) * up, down_weight, down_bias)` with `gate, up = linear(x, gate_up_weight, gate_up_bias)` in halves.

    Every product is rounded to the common dtype as a linear layer rounds it; the activation and its product with `up` are
    rounded as in `swiglu` and `geglu`. An accelerated implementation keeps `x` and the packed projection for backward and
    recomputes `act(gate) * up`, which saves one tensor of `[..., intermediate]` against the reference's separate steps.

    Args:
        x: [..., hidden], floating point.
        gate_up_weight: [2 * intermediate, hidden], the rows of the gate first, in the dtype of `x`.
        down_weight: [hidden_out, intermediate], in the dtype of `x`.
        gate_up_bias: [2 * intermediate] or None.
        down_bias: [hidden_out] or None.
        activation: "silu", "gelu" (exact, by the error function) or "gelu_tanh".

    Returns:
        [..., hidden_out] in the dtype of `x`.

    Raises:
        ValueError: an unknown activation, or weights whose sizes do not belong together.
        RuntimeError: from the matrix product, for `x` of another size or dtype than the weights.

    Differentiable in all tensors; cast under torch.autocast like a linear layer. Source: Shazeer 2020, arXiv:2002.05202;
    equals LlamaMLP and GemmaMLP of transformers with gate_proj and up_proj packed.
    """
    check_arguments(gate_up_weight, down_weight, activation)
    gate, up = linear(x, gate_up_weight, gate_up_bias).chunk(2, dim=-1)
    return linear(ACTIVATIONS[activation](gate) * up, down_weight, down_bias)


def check_arguments(gate_up_weight: Tensor, down_weight: Tensor, activation: str) -> None:
    """Raise ValueError for an unknown activation and for weights whose sizes do not belong together."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_mlp: activation={activation!r} is not one of {', '.join(map(repr, ACTIVATIONS))}")
    if gate_up_weight.shape[0] != 2 * down_weight.shape[1]:
        raise ValueError(
            f"gated_mlp: gate_up_weight has {gate_up_weight.shape[0]} rows, which is not twice the {down_weight.shape[1]} "
            "columns of down_weight: pack the gate's rows, then as many of the up projection"
        )
