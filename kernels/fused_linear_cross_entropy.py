"""Cross-entropy of an output head that never materialises all logits."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_models.kernels.cross_entropy import (
    CrossEntropyOutput,
    RowTerms,
    check_arguments,
    check_targets,
    compute_dtype,
    cross_entropy_result,
    normalise,
    reduce_rows,
    row_terms,
)
from liger_models.kernels.registry import contract

DEFAULT_MEMORY_BUDGET = 2**30  # bytes
MINIMUM_CHUNK_ROWS = 2048  # fewer rows make the matrix products slower than the memory is worth
CHUNK_ROWS_MULTIPLE = 256  # the tile of the matrix products


@contract(
    differentiable=("hidden", "weight", "bias"),
    outputs=("loss", "z_loss", "token_accuracy", "predicted_tokens"),
    autocast=("hidden", "weight", "bias"),
    result=cross_entropy_result,
)
def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    divisor: Tensor | None = None,
    accumulation_dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """`cross_entropy(hidden @ weight.T + bias, target, class_weight, ...)`, a chunk of rows at a time.

    The logits, and their gradient, are rounded to the dtype of `hidden`, as a linear layer rounds them; everything between is
    computed in fp32 (fp64 for fp64). Only one chunk's logits are alive at a time, in training too. What is frozen costs
    neither time nor memory. The size of the chunks changes no value but by the rounding of sums over rows.

    Args:
        hidden: [..., hidden], floating point.
        weight: [vocabulary, hidden] in the dtype of `hidden`.
        target: [...], int64.
        bias: [vocabulary] in the dtype of `hidden`, or None.
        class_weight: [vocabulary], the weight of each class, or None: `weight` of cross_entropy.
        ignore_index, lse_square_scale, label_smoothing, reduction, softcap, logit_scale, divisor: as in cross_entropy.
        accumulation_dtype: dtype in which the gradient of `weight` is added up over chunks before it is rounded to the dtype
            of `weight`; None for the dtype of `weight`. torch.float32 takes the rounding of the sum away for a buffer of
            four bytes per weight.
        memory_budget: bytes that one chunk's logits may take; None for 1 GiB. A chunk has at least 2048 rows all the same.
        return_z_loss, return_token_accuracy, return_predicted_tokens: as in cross_entropy.

    Returns:
        As cross_entropy.

    Raises:
        ValueError, IndexError: as cross_entropy.

    Differentiable in `hidden`, `weight` and `bias`. Source: equals a linear layer followed by
    torch.nn.functional.cross_entropy; chunking: Hsu et al. 2024, arXiv:2410.10989, section 3.2.
    """
    check_arguments(weight.shape[0], hidden.shape[:-1], target, class_weight, label_smoothing, reduction, softcap, divisor)
    rows, targets, dtype = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1), compute_dtype(hidden)
    check_targets(targets, weight.shape[0], ignore_index)
    normaliser = normalise(targets, class_weight, ignore_index, reduction, divisor, dtype)
    # Autograd adds up the chunks' gradients in the dtype of the tensor that the chunks share.
    shared = weight if accumulation_dtype is None else weight.to(accumulation_dtype)
    size = chunk_rows(rows.shape[0], weight.shape[0], dtype.itemsize, memory_budget)
    recompute = torch.is_grad_enabled() and rows.shape[0] > size
    chunks = []
    # A single chunk is no loop: torch.compile would make a graph for each number of rows.
    for start in (0,) if rows.shape[0] <= size else range(0, rows.shape[0], size):
        arguments = (
            rows[start : start + size], shared, bias, targets[start : start + size], class_weight, normaliser, ignore_index,
            lse_square_scale, label_smoothing, softcap, logit_scale, return_z_loss, return_token_accuracy,
            return_predicted_tokens,
        )  # fmt: skip
        if recompute:
            chunks.append(checkpoint(_chunk_terms, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(_chunk_terms(*arguments))
    loss, *extras = (None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks))
    assert loss is not None
    terms = RowTerms(loss, *extras)
    return cross_entropy_result(reduce_rows(terms, target.shape, reduction))


def _chunk_terms(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest) -> RowTerms:
    return row_terms(torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias), targets, *rest)


def chunk_rows(rows: int, vocabulary: int, element_size: int, memory_budget: int | None = None) -> int:
    """How many rows a chunk takes, so that the chunks are few, about equal, and their logits within the budget.

    Args:
        rows: rows in all.
        vocabulary: columns of the logits.
        element_size: bytes per logit.
        memory_budget: bytes that a chunk's logits may take; None for DEFAULT_MEMORY_BUDGET. MINIMUM_CHUNK_ROWS fit always.

    Returns:
        The rows of each chunk, at least 1; the last may have fewer. A multiple of CHUNK_ROWS_MULTIPLE unless one chunk does.
    """
    budget = DEFAULT_MEMORY_BUDGET if memory_budget is None else memory_budget
    multiple = CHUNK_ROWS_MULTIPLE
    most = max(MINIMUM_CHUNK_ROWS, budget // (vocabulary * element_size) // multiple * multiple)
    if rows <= most:
        return max(rows, 1)
    chunks = -(-rows // most)
    return -(-rows // (chunks * multiple)) * multiple
