"""Cross-entropy in Triton: one program per row, an online softmax over blocks of columns, then a sweep for the gradient.

A block is [lanes, 8] columns. A thread keeps the running maximum and sum of its own lanes, so the first sweep needs no exchange
between threads before its end, and loads of one warp hide the arithmetic of another.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_models.kernels.backends.triton.launch import is_traced, launch, next_power_of_2, rows_of
from liger_models.kernels.cross_entropy import RowTerms, check_arguments, check_targets, reduce_rows

LANE_COLUMNS = 8  # 16 bytes of bf16: one load
MAX_BLOCK = 16384  # columns: 16 per thread of the largest program, so its 64 registers per thread suffice
MAX_THREADS = 1024

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-1e38)  # finite: a lane that saw only masked columns must not give inf - inf


@triton.jit
def _normaliser_kernel(
    normaliser_ptr, target_ptr, weight_ptr, divisor_ptr, rows, vocabulary, ignore_index,
    HAS_WEIGHT: tl.constexpr, HAS_DIVISOR: tl.constexpr, MEAN: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[factor of the loss, factor of the z-loss, factor of the accuracy, sum of the class weights]."""
    columns = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), tl.int32)
    weights = tl.zeros((BLOCK,), tl.float32)
    all_weights = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        inside = start + columns < rows
        target = tl.load(target_ptr + start + columns, mask=inside, other=0)
        valid = inside & (target != ignore_index)
        counts += valid.to(tl.int32)
        if HAS_WEIGHT:
            readable = valid & (target >= 0) & (target < vocabulary)
            weights += tl.load(weight_ptr + target, mask=readable, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        for start in range(0, vocabulary, BLOCK):
            inside = start + columns < vocabulary
            all_weights += tl.load(weight_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
    count = tl.sum(counts, axis=0).to(tl.float32)
    weight_sum = tl.sum(all_weights, axis=0)
    loss_divisor = count
    z_divisor = count
    if HAS_WEIGHT:
        loss_divisor = tl.sum(weights, axis=0)
    else:
        weight_sum = weight_sum + vocabulary
    if HAS_DIVISOR:
        loss_divisor = tl.load(divisor_ptr).to(tl.float32)
        z_divisor = loss_divisor
    if not MEAN:
        loss_divisor = count * 0.0 + 1.0
        z_divisor = loss_divisor
    some = count > 0.0
    accuracy_divisor = count * 0.0 + 1.0 if PER_ROW else count
    tl.store(normaliser_ptr, tl.where(some, 1.0 / tl.where(some, loss_divisor, 1.0), 0.0))
    tl.store(normaliser_ptr + 1, tl.where(some, 1.0 / tl.where(some, z_divisor, 1.0), 0.0))
    tl.store(normaliser_ptr + 2, tl.where(some, 1.0 / tl.where(some, accuracy_divisor, 1.0), 0.0))
    tl.store(normaliser_ptr + 3, weight_sum)


@triton.jit
def _effective(logits, mask, softcap, logit_scale, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """The effective logits in fp32, -inf off the mask; the logits before the softcap; and the derivative of the softcap."""
    z = logits.to(tl.float32)
    slope = z
    if HAS_SCALE:
        z = tl.where(mask, z * logit_scale, float("-inf"))
    before = z
    if HAS_SOFTCAP:
        # tanh by exp(-2|u|), which neither overflows nor cancels in the derivative
        decay = tl.exp2(tl.abs(z) * (-2.0 * _LOG2E / softcap))
        bound = softcap * (1.0 - decay) / (1.0 + decay)
        slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
        z = tl.where(mask, tl.where(z < 0.0, -bound, bound), float("-inf"))
        z = tl.where(before == before, z, before)  # NaN stays NaN
    return z, before, slope


@triton.jit
def _first_sweep(
    logits_ptr, weight_ptr, vocabulary, softcap, logit_scale,
    HAS_WEIGHT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SMOOTHS: tl.constexpr,
    PREDICTS: tl.constexpr, LANES: tl.constexpr, LANE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A row's log2 Σ exp z, Σ w·z (where it is smoothed) and column of the largest logit (where that is wanted)."""
    lanes = tl.arange(0, LANES)
    maximum = tl.full((LANES,), _LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    largest = tl.full((LANES,), float("-inf"), tl.float32)
    position = tl.full((LANES,), 0x7FFFFFFF, tl.int32)
    for start in range(0, vocabulary, LANES * LANE_COLUMNS):
        columns = start + lanes[:, None] * LANE_COLUMNS + tl.arange(0, LANE_COLUMNS)[None, :]
        mask = columns < vocabulary
        logits = tl.load(logits_ptr + columns, mask=mask, other=float("-inf"))
        z, before, _ = _effective(logits, mask, softcap, logit_scale, HAS_SCALE, HAS_SOFTCAP)
        exponent = z * _LOG2E
        new_maximum = tl.maximum(maximum, tl.max(exponent, axis=1))
        total = total * tl.exp2(maximum - new_maximum) + tl.sum(tl.exp2(exponent - new_maximum[:, None]), axis=1)
        maximum = new_maximum
        if SMOOTHS:
            term = tl.where(mask, z, 0.0)
            if HAS_WEIGHT:
                term = term * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            weighted += tl.sum(term, axis=1)
        if PREDICTS:
            lane_largest = tl.max(before, axis=1)
            lane_position = tl.min(tl.where(before == lane_largest[:, None], columns, 0x7FFFFFFF), axis=1)
            better = lane_largest > largest  # strictly: the first of equals stays
            position = tl.where(better, lane_position, position)
            largest = tl.where(better, lane_largest, largest)
    row_maximum = tl.max(maximum, axis=0)
    log2_sum = row_maximum + tl.log2(tl.sum(total * tl.exp2(maximum - row_maximum), axis=0))
    weighted_sum = tl.sum(weighted, axis=0)
    predicted = tl.min(tl.where(largest == tl.max(largest, axis=0), position, 0x7FFFFFFF), axis=0)
    return log2_sum, weighted_sum, tl.where(predicted < vocabulary, predicted, 0)


@triton.jit
def _second_sweep(
    gradient_ptr, logits_ptr, weight_ptr, vocabulary, softcap, logit_scale, log2_sum, target, factor, hit, smoothing,
    HAS_WEIGHT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SMOOTHS: tl.constexpr,
    LANES: tl.constexpr, LANE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write (factor·softmax - smoothing·w - hit at the target)·dz/dlogits. Backwards: the last columns read are in cache."""
    lanes = tl.arange(0, LANES)
    blocks = tl.cdiv(vocabulary, LANES * LANE_COLUMNS)
    for block in range(blocks):
        start = (blocks - 1 - block) * (LANES * LANE_COLUMNS)
        columns = start + lanes[:, None] * LANE_COLUMNS + tl.arange(0, LANE_COLUMNS)[None, :]
        mask = columns < vocabulary
        logits = tl.load(logits_ptr + columns, mask=mask, other=float("-inf"))
        z, _, slope = _effective(logits, mask, softcap, logit_scale, HAS_SCALE, HAS_SOFTCAP)
        gradient = factor * tl.exp2(z * _LOG2E - log2_sum)
        if SMOOTHS:
            if HAS_WEIGHT:
                gradient -= smoothing * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            else:
                gradient -= smoothing
        gradient = tl.where(columns == target, gradient - hit, gradient)
        if HAS_SOFTCAP:
            gradient = gradient * slope
        if HAS_SCALE:
            gradient = gradient * logit_scale
        tl.store(gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _zero(row_ptr, vocabulary, LANES: tl.constexpr, LANE_COLUMNS: tl.constexpr):
    lanes = tl.arange(0, LANES)
    zeros = tl.zeros((LANES, LANE_COLUMNS), row_ptr.dtype.element_ty)
    for start in range(0, vocabulary, LANES * LANE_COLUMNS):
        columns = start + lanes[:, None] * LANE_COLUMNS + tl.arange(0, LANE_COLUMNS)[None, :]
        tl.store(row_ptr + columns, zeros, mask=columns < vocabulary)


@triton.jit
def _row_kernel(
    logits_ptr, target_ptr, weight_ptr, normaliser_ptr, log2_sum_ptr, loss_ptr, z_loss_ptr, correct_ptr, predicted_ptr,
    gradient_ptr, output_gradient_ptr, logits_stride, gradient_stride, output_gradient_stride, vocabulary, ignore_index,
    lse_square_scale, label_smoothing, softcap, logit_scale,
    WANTS_LOSS: tl.constexpr, WANTS_GRADIENT: tl.constexpr, WANTS_Z_LOSS: tl.constexpr, WANTS_CORRECT: tl.constexpr,
    WANTS_PREDICTED: tl.constexpr, HAS_OUTPUT_GRADIENT: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, SMOOTHS: tl.constexpr, LANES: tl.constexpr, LANE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A row's terms (WANTS_LOSS; else its log2 Σ exp z is given) and its gradient (WANTS_GRADIENT), which may be in place."""
    row = tl.program_id(0).to(tl.int64)  # 64-bit: row offsets can pass 2**31
    logits_ptr += row * logits_stride
    if WANTS_GRADIENT:
        gradient_ptr += row * gradient_stride
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        if WANTS_LOSS:
            tl.store(loss_ptr + row, 0.0)
            tl.store(log2_sum_ptr + row, 0.0)
        if WANTS_Z_LOSS:
            tl.store(z_loss_ptr + row, 0.0)
        if WANTS_CORRECT:
            tl.store(correct_ptr + row, 0.0)
        if WANTS_PREDICTED:
            tl.store(predicted_ptr + row, target)
        if WANTS_GRADIENT:
            _zero(gradient_ptr, vocabulary, LANES, LANE_COLUMNS)
        return

    loss_factor = tl.load(normaliser_ptr)
    z_factor = tl.load(normaliser_ptr + 1) * lse_square_scale
    inside = (target >= 0) & (target < vocabulary)
    hit = loss_factor
    if HAS_WEIGHT:
        hit = hit * tl.load(weight_ptr + target, mask=inside, other=0.0).to(tl.float32)
    hit = tl.where(inside, hit, float("nan"))
    smoothing = loss_factor * 0.0
    factor = hit
    if SMOOTHS:
        hit = hit * (1.0 - label_smoothing)
        smoothing = loss_factor * label_smoothing / vocabulary
        factor = hit + smoothing * tl.load(normaliser_ptr + 3)

    if WANTS_LOSS:
        target_logit = tl.load(logits_ptr + target, mask=inside, other=0.0)
        target_z, _, _ = _effective(target_logit, inside, softcap, logit_scale, HAS_SCALE, HAS_SOFTCAP)
        log2_sum, weighted_sum, predicted = _first_sweep(
            logits_ptr, weight_ptr, vocabulary, softcap, logit_scale, HAS_WEIGHT, HAS_SCALE, HAS_SOFTCAP, SMOOTHS,
            WANTS_CORRECT or WANTS_PREDICTED, LANES, LANE_COLUMNS,
        )  # fmt: skip
        lse = log2_sum * _LN2
        z_loss = z_factor * lse * lse
        loss = hit * (lse - target_z) + z_loss
        if SMOOTHS:
            loss += smoothing * (tl.load(normaliser_ptr + 3) * lse - weighted_sum)
        tl.store(loss_ptr + row, loss)
        tl.store(log2_sum_ptr + row, log2_sum)
        if WANTS_Z_LOSS:
            tl.store(z_loss_ptr + row, z_loss)
        if WANTS_CORRECT:
            tl.store(correct_ptr + row, tl.where(predicted == target, tl.load(normaliser_ptr + 2), 0.0))
        if WANTS_PREDICTED:
            tl.store(predicted_ptr + row, predicted.to(tl.int64))
    else:
        log2_sum = tl.load(log2_sum_ptr + row)

    if WANTS_GRADIENT:
        factor += 2.0 * z_factor * log2_sum * _LN2
        if HAS_OUTPUT_GRADIENT:
            output_gradient = tl.load(output_gradient_ptr + row * output_gradient_stride).to(tl.float32)
            factor, hit, smoothing = factor * output_gradient, hit * output_gradient, smoothing * output_gradient
        _second_sweep(
            gradient_ptr, logits_ptr, weight_ptr, vocabulary, softcap, logit_scale, log2_sum, target, factor, hit, smoothing,
            HAS_WEIGHT, HAS_SCALE, HAS_SOFTCAP, SMOOTHS, LANES, LANE_COLUMNS,
        )  # fmt: skip


class Options(NamedTuple):
    """The scalars of a loss, as the contract names them."""

    ignore_index: int
    lse_square_scale: float
    label_smoothing: float
    softcap: float | None
    logit_scale: float


class RowBuffers(NamedTuple):
    """What the kernel writes for each row, [rows] each; None where nobody asked."""

    log2_sum: Tensor
    loss: Tensor
    z_loss: Tensor | None
    correct: Tensor | None
    predicted: Tensor | None

    def rows(self, start: int, end: int) -> "RowBuffers":
        return RowBuffers(*(None if buffer is None else buffer[start:end] for buffer in self))

    def outputs(self, shape: tuple[int, ...], reduction: str) -> tuple[Tensor | None, ...]:
        """The op's outputs."""
        return reduce_rows(RowTerms(*self[1:]), shape, reduction)


def row_buffers(
    rows: int, device: torch.device, return_z_loss: bool, return_token_accuracy: bool, return_predicted_tokens: bool
) -> RowBuffers:
    def buffer(wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(rows, dtype=dtype, device=device) if wanted else None

    return RowBuffers(
        torch.empty(rows, dtype=torch.float32, device=device), torch.empty(rows, dtype=torch.float32, device=device),
        buffer(return_z_loss), buffer(return_token_accuracy), buffer(return_predicted_tokens, torch.int64),
    )  # fmt: skip


def normalise(
    targets: Tensor, class_weight: Tensor | None, vocabulary: int, ignore_index: int, reduction: str, divisor: Tensor | None
) -> Tensor:
    """[4] fp32 on the device of the targets: the row factors of loss, z-loss and accuracy, and the sum of class weights."""
    normaliser = torch.empty(4, dtype=torch.float32, device=targets.device)
    launch(
        _normaliser_kernel, (1,), normaliser, targets, class_weight, None if divisor is None else divisor.to(targets.device),
        targets.shape[0], vocabulary, ignore_index, HAS_WEIGHT=class_weight is not None, HAS_DIVISOR=divisor is not None,
        MEAN=reduction == "mean", PER_ROW=reduction == "none", BLOCK=2048, num_warps=16,
    )  # fmt: skip
    return normaliser


def launch_rows(
    logits: Tensor,
    targets: Tensor,
    class_weight: Tensor | None,
    normaliser: Tensor,
    buffers: RowBuffers,
    options: Options,
    *,
    wants_loss: bool,
    gradient: Tensor | None = None,
    output_gradient: Tensor | None = None,
) -> None:
    """Fill the buffers (`wants_loss`) and the gradient of [rows, vocabulary] logits, which may be the logits themselves.

    Without `wants_loss` only `log2_sum` of the buffers is used, and read. `output_gradient` is 0-d or [rows]; None for 1.
    """
    vocabulary = logits.shape[1]
    block = max(min(next_power_of_2(vocabulary), MAX_BLOCK), 128)
    threads_per_warp = 64 if torch.version.hip else 32
    launch(
        _row_kernel, (logits.shape[0],), logits, targets, class_weight, normaliser, buffers.log2_sum, buffers.loss,
        buffers.z_loss, buffers.correct, buffers.predicted, gradient, output_gradient, logits.stride(0),
        0 if gradient is None else gradient.stride(0),
        0 if output_gradient is None or output_gradient.dim() == 0 else output_gradient.stride(0),
        vocabulary, options.ignore_index, options.lse_square_scale, options.label_smoothing, options.softcap or 1.0,
        options.logit_scale, WANTS_LOSS=wants_loss, WANTS_GRADIENT=gradient is not None,
        WANTS_Z_LOSS=wants_loss and buffers.z_loss is not None, WANTS_CORRECT=wants_loss and buffers.correct is not None,
        WANTS_PREDICTED=wants_loss and buffers.predicted is not None, HAS_OUTPUT_GRADIENT=output_gradient is not None,
        HAS_WEIGHT=class_weight is not None, HAS_SCALE=options.logit_scale != 1.0, HAS_SOFTCAP=options.softcap is not None,
        SMOOTHS=options.label_smoothing != 0.0, LANES=block // LANE_COLUMNS, LANE_COLUMNS=LANE_COLUMNS,
        num_warps=max(min(block // 16, MAX_THREADS) // threads_per_warp, 1),
    )  # fmt: skip


def flat(tensor: Tensor | None) -> Tensor | None:
    """A tensor of targets or class weights as the kernels read it: one dimension, no gaps."""
    return None if tensor is None else tensor.detach().reshape(-1).contiguous()


def check_targets_if_debugging(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """With LIGER_DEBUG=1 in the environment, raise for targets out of range. It waits for the device, so only then."""
    if os.environ.get("LIGER_DEBUG") == "1" and not is_traced(targets):
        check_targets(targets, vocabulary, ignore_index)


def refuses(logits, *_rest):
    return "float64 logits: the kernel computes in float32" if logits.dtype == torch.float64 else None


def forward(
    needs, logits, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, logit_scale, divisor,
    return_z_loss, return_token_accuracy, return_predicted_tokens,
):  # fmt: skip
    check_arguments(logits.shape[-1], logits.shape[:-1], target, weight, label_smoothing, reduction, softcap, divisor)
    rows, targets, class_weight = rows_of(logits), flat(target), flat(weight)
    check_targets_if_debugging(targets, rows.shape[1], ignore_index)
    normaliser = normalise(targets, class_weight, rows.shape[1], ignore_index, reduction, divisor)
    buffers = row_buffers(rows.shape[0], rows.device, return_z_loss, return_token_accuracy, return_predicted_tokens)
    options = Options(ignore_index, lse_square_scale, label_smoothing, softcap, logit_scale)
    launch_rows(rows, targets, class_weight, normaliser, buffers, options, wants_loss=True)
    return buffers.outputs(target.shape, reduction), (normaliser, buffers.log2_sum)


def backward(
    needs, gradients, *, logits, target, weight, ignore_index, lse_square_scale, label_smoothing, softcap, logit_scale,
    normaliser, log2_sum,
):  # fmt: skip
    rows, output_gradient = rows_of(logits), gradients[0]
    if output_gradient.dim() > 0:
        output_gradient = output_gradient.reshape(-1)
    gradient = torch.empty(rows.shape, dtype=logits.dtype, device=logits.device)
    options = Options(ignore_index, lse_square_scale, label_smoothing, softcap, logit_scale)
    launch_rows(
        rows, flat(target), flat(weight), normaliser, RowBuffers(log2_sum, log2_sum, None, None, None), options,
        wants_loss=False, gradient=gradient, output_gradient=output_gradient,
    )  # fmt: skip
    return (gradient.view(logits.shape),)
