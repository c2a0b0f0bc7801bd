"""Token embedding."""

import torch
from torch import Tensor

from liger_models.kernels.registry import contract


@contract(differentiable=("weight",))
def embedding(indices: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """The rows of `weight` that `indices` name.

    Args:
        indices: [...], int64 or int32, each in [0, vocabulary).
        weight: [vocabulary, hidden], floating point.
        padding_idx: the row that receives no gradient (it is read as any other); negative counts from the end.

    Returns:
        [..., hidden] in the dtype of `weight`.

    Differentiable in `weight`; the gradient is dense. An implementation sums the gradients of equal indices in fp32 and rounds
    once. (The reference sums as torch does on its device, for bf16 on CPU in bf16.)

    Raises:
        IndexError on CPU, a device-side assertion on an accelerator: an index out of range.

    Source: torch.nn.functional.embedding, which stock models use.
    """
    return torch.nn.functional.embedding(indices, weight, padding_idx)
