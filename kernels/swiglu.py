"""The SwiGLU activation: a gate through SiLU times a second projection."""

import torch
from torch import Tensor

from liger_models.kernels.registry import contract


@contract(differentiable=("gate", "up"))
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, element by element.

    Computed in fp32 (fp64 for fp64 input); `silu(gate)` is rounded to the dtype of `gate` and the product once more, as the
    two operations do separately. Gradients are computed in fp32 from `gate` and `up`, which are all that is kept, and rounded
    once.

    Args:
        gate: [..., width], floating point. Rows may be strided: a chunk of a packed projection is read where it is.
        up: the same shape.

    Returns:
        The same shape, in the promoted dtype of both.

    Raises:
        ValueError: the shapes differ.

    Differentiable in `gate` and `up`. Source: Shazeer 2020, arXiv:2002.05202; equals the activation inside LlamaMLP of
    transformers.
    """
    check_same_shape(gate, up)
    return torch.nn.functional.silu(gate) * up


def check_same_shape(gate: Tensor, up: Tensor) -> None:
    """Raise ValueError unless both halves of a gated activation have one shape: they are not broadcast."""
    if gate.shape != up.shape:
        raise ValueError(
            f"gate and up must have one shape, got {tuple(gate.shape)} and {tuple(up.shape)}: "
            "expand the smaller one before the call"
        )
