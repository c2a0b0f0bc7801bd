"""The GEGLU activation: a gate through GELU times a second projection."""

import torch
from torch import Tensor

from liger_models.kernels.registry import contract
from liger_models.kernels.swiglu import check_same_shape

APPROXIMATIONS = ("tanh", "none")


@contract(differentiable=("gate", "up"))
def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """`gelu(gate) * up`, element by element.

    Computed in fp32 (fp64 for fp64 input); `gelu(gate)` is rounded to the dtype of `gate` and the product once more, as the
    two operations do separately. Gradients are computed in fp32 from `gate` and `up`, which are all that is kept, and rounded
    once.

    Args:
        gate: [..., width], floating point. Rows may be strided: a chunk of a packed projection is read where it is.
        up: the same shape.
        approximate: "tanh", the approximation by a hyperbolic tangent, or "none", exact by the error function; as in
            torch.nn.functional.gelu.

    Returns:
        The same shape, in the promoted dtype of both.

    Raises:
        ValueError: the shapes differ, or `approximate` is neither of the two.

    Differentiable in `gate` and `up`. Source: Shazeer 2020, arXiv:2002.05202; Hendrycks and Gimpel 2016, arXiv:1606.08415;
    equals the activation inside GemmaMLP of transformers ("tanh" for hidden_act "gelu_pytorch_tanh", "none" for "gelu").
    """
    check_same_shape(gate, up)
    check_approximate(approximate)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def check_approximate(approximate: str) -> None:
    """Raise ValueError for a form of GELU that does not exist."""
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"geglu: approximate={approximate!r} is not one of {', '.join(map(repr, APPROXIMATIONS))}")
