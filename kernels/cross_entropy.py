"""Cross-entropy of logits, with z-loss, label smoothing, class weights and logit softcapping."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels.registry import contract

REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyOutput(NamedTuple):
    """What a loss returns when more than the loss was asked for; None for what was not.

    Attributes:
        loss: 0-d, or one per row with reduction "none".
        z_loss: the part of the loss that `lse_square_scale` added, reduced as the loss is. Detached.
        token_accuracy: share of the rows that are not ignored whose largest logit is the target's; 0 or 1 per row with
            reduction "none". Detached.
        predicted_tokens: int64 per row, the column of the largest logit (the first of equals); ignore_index at ignored rows.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class Normaliser(NamedTuple):
    """0-d factors by which each row's terms are multiplied before they are summed."""

    loss: Tensor
    z_loss: Tensor
    accuracy: Tensor


class RowTerms(NamedTuple):
    """Each row's share of the outputs, [rows] each, None where not asked for; 0 (ignore_index) at ignored rows."""

    loss: Tensor
    z_loss: Tensor | None
    correct: Tensor | None
    predicted: Tensor | None


def cross_entropy_result(outputs: tuple) -> Tensor | CrossEntropyOutput:
    """The bare loss where nothing else was asked for, else a CrossEntropyOutput whose extras carry no gradient."""
    loss, *extras = outputs
    if all(extra is None for extra in extras):
        return loss
    return CrossEntropyOutput(loss, *(None if extra is None else extra.detach() for extra in extras))


@contract(
    differentiable=("logits",),
    outputs=("loss", "z_loss", "token_accuracy", "predicted_tokens"),
    result=cross_entropy_result,
)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    divisor: Tensor | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Cross-entropy of the effective logits z = softcap·tanh(logit_scale·logits / softcap), or logit_scale·logits.

    With lse = log Σ exp z, weights w (1 without `weight`), smoothing s and V columns, a row with target t that is not
    ignored has the loss

        (1 - s)·w[t]·(lse - z[t]) + s/V·Σ_c w[c]·(lse - z[c]) + lse_square_scale·lse²

    "sum" adds the rows. "mean" divides the first two terms by Σ w[t] and the last (the z-loss) by the number of rows that are
    not ignored; with `divisor` everything is divided by that number instead. All of it in fp32 (fp64 for fp64 logits); only
    the gradient is rounded, to the dtype of the logits. The logits are not written to.

    Where every row is ignored (or there is none) the loss is 0 and so is every gradient, for every reduction and divisor.
    torch's mean is NaN there.

    Args:
        logits: [..., vocabulary], floating point.
        target: [...], int64: a column or `ignore_index` per row.
        weight: [vocabulary], floating point, the weight of each class, or None for 1. Not differentiable.
        ignore_index: rows with this target count for nothing. It may be a column.
        lse_square_scale: factor of lse², the z-loss.
        label_smoothing: share of the target distribution that is spread evenly over the columns, 0 to 1.
        reduction: "mean", "sum" or "none" (a loss per row, shaped as `target`; 0 at ignored rows).
        softcap: bound of the effective logits, positive, or None for no bound.
        logit_scale: factor of the logits.
        divisor: 0-d tensor of any dtype, or None. Only with reduction "mean".
        return_z_loss, return_token_accuracy, return_predicted_tokens: ask for these parts of CrossEntropyOutput.

    Returns:
        The loss in fp32 (fp64 for fp64 logits), or a CrossEntropyOutput if anything else was asked for.

    Raises:
        ValueError: arguments that do not fit together.
        IndexError: a target that is neither `ignore_index` nor a column. The reference always checks (not while it is being
            compiled). Accelerated backends check, and wait for the device, if the environment says LIGER_DEBUG=1; otherwise
            such a row's loss and gradient are NaN.

    Differentiable in `logits`. Source: equals torch.nn.functional.cross_entropy; z-loss: Chowdhery et al. 2022,
    arXiv:2204.02311, section 5; softcap: Gemma Team 2024, arXiv:2408.00118, section 2.
    """
    check_arguments(logits.shape[-1], logits.shape[:-1], target, weight, label_smoothing, reduction, softcap, divisor)
    targets = target.reshape(-1)
    check_targets(targets, logits.shape[-1], ignore_index)
    dtype = compute_dtype(logits)
    normaliser = normalise(targets, weight, ignore_index, reduction, divisor, dtype)
    terms = row_terms(
        logits.reshape(-1, logits.shape[-1]), targets, weight, normaliser, ignore_index, lse_square_scale, label_smoothing,
        softcap, logit_scale, return_z_loss, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    return cross_entropy_result(reduce_rows(terms, target.shape, reduction))


def check_arguments(
    vocabulary: int,
    shape: tuple[int, ...],
    target: Tensor,
    class_weight: Tensor | None,
    label_smoothing: float,
    reduction: str,
    softcap: float | None,
    divisor: Tensor | None,
) -> None:
    """Raises ValueError if the arguments of a loss over rows of this shape do not fit together. Does not synchronise."""
    if target.shape != shape:
        raise ValueError(f"cross_entropy: target has shape {tuple(target.shape)}, the rows {tuple(shape)}; they must be equal")
    if class_weight is not None and class_weight.shape != (vocabulary,):
        raise ValueError(
            f"cross_entropy: the class weights have shape {tuple(class_weight.shape)}; expected one per column, ({vocabulary},)"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction {reduction!r}; expected one of {', '.join(REDUCTIONS)}")
    if divisor is not None and reduction != "mean":
        raise ValueError(f"cross_entropy: divisor replaces the count of a mean; pass reduction='mean', not {reduction!r}")
    if divisor is not None and divisor.numel() != 1:
        raise ValueError(f"cross_entropy: divisor has shape {tuple(divisor.shape)}; expected a 0-d tensor")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"cross_entropy: label_smoothing {label_smoothing}; expected a share from 0 to 1")
    if softcap is not None and softcap <= 0.0:
        raise ValueError(f"cross_entropy: softcap {softcap}; expected a positive bound, or None for no bound")


def check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raises IndexError for the first target that is neither a column nor `ignore_index`. Waits for the device."""
    if torch.compiler.is_compiling():
        return
    outside = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
    if bool(outside.any()):
        row = int(outside.int().argmax())
        raise IndexError(
            f"cross_entropy: row {row} has target {int(targets[row])}, which is neither a column of the vocabulary "
            f"(0 to {vocabulary - 1}) nor ignore_index ({ignore_index}); correct the labels or resize the output head"
        )


def compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def normalise(
    targets: Tensor, class_weight: Tensor | None, ignore_index: int, reduction: str, divisor: Tensor | None, dtype: torch.dtype
) -> Normaliser:
    """The factors of the rows' terms; zeros where a mean is taken over no rows."""
    valid = targets != ignore_index
    count = valid.sum().to(dtype)
    one, zero = torch.ones_like(count), torch.zeros_like(count)
    accuracy = one if reduction == "none" else torch.where(count > 0, 1 / count, zero)
    if reduction != "mean":
        return Normaliser(one, one, accuracy)
    total = count
    if class_weight is not None:
        total = torch.where(valid, class_weight.detach().to(dtype)[torch.where(valid, targets, 0)], zero).sum()
    if divisor is not None:
        total = count_of_z = divisor.detach().reshape(()).to(count)
    else:
        count_of_z = count
    return Normaliser(torch.where(count > 0, 1 / total, zero), torch.where(count > 0, 1 / count_of_z, zero), accuracy)


def row_terms(
    logits: Tensor,
    targets: Tensor,
    class_weight: Tensor | None,
    normaliser: Normaliser,
    ignore_index: int,
    lse_square_scale: float,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    return_z_loss: bool,
    return_token_accuracy: bool,
    return_predicted_tokens: bool,
) -> RowTerms:
    """The terms of [rows, vocabulary] logits, multiplied by the normaliser: sums over chunks of rows add up to the whole."""
    z = logits.to(compute_dtype(logits))
    z = z if logit_scale == 1.0 else logit_scale * z
    predicted = z.detach().argmax(-1) if return_token_accuracy or return_predicted_tokens else None
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    weights = None if class_weight is None else class_weight.detach().to(z.dtype)
    valid = targets != ignore_index
    column = torch.where(valid, targets, 0)
    lse = torch.logsumexp(z, -1)
    loss = lse - z.gather(-1, column[:, None])[:, 0]
    loss = loss if weights is None else weights[column] * loss
    if label_smoothing != 0.0:
        even = lse - z.mean(-1) if weights is None else lse * weights.mean() - (z * weights).mean(-1)
        loss = (1 - label_smoothing) * loss + label_smoothing * even
    loss = loss * normaliser.loss
    z_loss = None
    if lse_square_scale != 0.0 or return_z_loss:
        z_loss = torch.where(valid, lse_square_scale * lse * lse * normaliser.z_loss, 0.0)
        loss = loss + z_loss
    return RowTerms(
        torch.where(valid, loss, 0.0),
        z_loss if return_z_loss else None,
        (valid & (predicted == targets)) * normaliser.accuracy if return_token_accuracy else None,
        predicted.masked_fill(~valid, ignore_index) if predicted is not None and return_predicted_tokens else None,
    )


def reduce_rows(terms: RowTerms, shape: tuple[int, ...], reduction: str) -> tuple[Tensor | None, ...]:
    """The op's outputs from its rows' terms."""
    *summed, predicted = (None if term is None else term.reshape(shape) for term in terms)
    if reduction != "none":
        summed = [None if term is None else term.sum() for term in summed]
    return (*summed, predicted)
