"""Output head and cross-entropy by chunks of rows: matrix products from the vendor's library, everything between in Triton.

The gradients are made in forward, while a chunk's logits are there, with an output gradient of 1; backward scales them. Where
the output gradient has to be known first they are made in backward, which makes the logits again: for a loss per row, and for
float16, whose gradients would underflow before a loss scale reaches them.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_models.kernels import fused_linear_cross_entropy as contract
from liger_models.kernels.backends.triton.cross_entropy import (
    Options,
    RowBuffers,
    check_targets_if_debugging,
    flat,
    launch_rows,
    normalise,
    row_buffers,
)
from liger_models.kernels.backends.triton.launch import is_traced, launch, multiprocessors, rows_of
from liger_models.kernels.cross_entropy import check_arguments

UPCAST_ROWS = 256  # rows of a chunk that are copied to the accumulation dtype at once, where a product cannot mix dtypes


@triton.jit
def _scale_kernel(tensor_ptr, scale_ptr, elements, BLOCK: tl.constexpr):
    """Multiply in place by a number in device memory; by 1 costs nothing."""
    scale = tl.load(scale_ptr).to(tl.float32)
    if scale != 1.0:
        program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
        for start in range(program * BLOCK, elements, programs * BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < elements
            values = tl.load(tensor_ptr + offsets, mask=mask)
            tl.store(tensor_ptr + offsets, (values.to(tl.float32) * scale).to(values.dtype), mask=mask)


def refuses(hidden, weight, *_rest):
    return "float64 input: the kernel computes in float32" if hidden.dtype == torch.float64 else None


def forward(
    needs, hidden, weight, target, bias, class_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
    logit_scale, divisor, accumulation_dtype, memory_budget, return_z_loss, return_token_accuracy, return_predicted_tokens,
):  # fmt: skip
    vocabulary = weight.shape[0]
    check_arguments(vocabulary, hidden.shape[:-1], target, class_weight, label_smoothing, reduction, softcap, divisor)
    rows, targets, class_weight = rows_of(hidden), flat(target), flat(class_weight)
    check_targets_if_debugging(targets, vocabulary, ignore_index)
    normaliser = normalise(targets, class_weight, vocabulary, ignore_index, reduction, divisor)
    buffers = row_buffers(rows.shape[0], rows.device, return_z_loss, return_token_accuracy, return_predicted_tokens)
    options = Options(ignore_index, lse_square_scale, label_smoothing, softcap, logit_scale)
    wanted = (False, False, False) if _deferred(reduction, hidden.dtype) else needs
    gradients = _chunks(
        wanted, rows, weight, bias, targets, class_weight, normaliser, buffers, options, accumulation_dtype, memory_budget,
        wants_loss=True,
    )  # fmt: skip
    return buffers.outputs(target.shape, reduction), (normaliser, buffers.log2_sum, *gradients)


def backward(
    needs, gradients, *, hidden, weight, target, bias, class_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
    softcap, logit_scale, accumulation_dtype, memory_budget, normaliser, log2_sum, d_hidden, d_weight, d_bias,
):  # fmt: skip
    """Scales in place the gradients that forward made: nobody else holds them. A second call goes to `backward_again`."""
    if _deferred(reduction, hidden.dtype):
        return backward_again(
            needs, gradients, hidden=hidden, weight=weight, target=target, bias=bias, class_weight=class_weight,
            ignore_index=ignore_index, lse_square_scale=lse_square_scale, label_smoothing=label_smoothing,
            reduction=reduction, softcap=softcap, logit_scale=logit_scale, accumulation_dtype=accumulation_dtype,
            memory_budget=memory_budget, normaliser=normaliser, log2_sum=log2_sum, d_hidden=None, d_weight=None, d_bias=None,
        )  # fmt: skip
    for tensor in (d_hidden, d_weight, d_bias):
        if tensor is not None:
            launch(_scale_kernel, (8 * multiprocessors(tensor.device),), tensor, gradients[0], tensor.numel(), BLOCK=4096)
    return None if d_hidden is None else d_hidden.view(hidden.shape), d_weight, d_bias


def backward_again(
    needs, gradients, *, hidden, weight, target, bias, class_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
    softcap, logit_scale, accumulation_dtype, memory_budget, normaliser, log2_sum, d_hidden, d_weight, d_bias,
):  # fmt: skip
    """Makes the logits again, and from them the gradients, with the output gradient in them."""
    output_gradient = gradients[0] if gradients[0].dim() == 0 else gradients[0].reshape(-1)
    options = Options(ignore_index, lse_square_scale, label_smoothing, softcap, logit_scale)
    d_hidden, d_weight, d_bias = _chunks(
        needs, rows_of(hidden), weight, bias, flat(target), flat(class_weight), normaliser,
        RowBuffers(log2_sum, log2_sum, None, None, None), options, accumulation_dtype, memory_budget,
        wants_loss=False, output_gradient=output_gradient,
    )  # fmt: skip
    return None if d_hidden is None else d_hidden.view(hidden.shape), d_weight, d_bias


def traced_backward(needs, gradients, *, hidden, reduction, d_hidden, d_weight, d_bias, **_rest):
    """The scaling in plain torch, for torch.compile, whose library ops must not return what they were given."""
    if _deferred(reduction, hidden.dtype):
        return None
    scaled = [None if tensor is None else tensor * gradients[0].to(tensor.dtype) for tensor in (d_hidden, d_weight, d_bias)]
    return None if d_hidden is None else scaled[0].view(hidden.shape), scaled[1], scaled[2]


def _deferred(reduction: str, dtype: torch.dtype) -> bool:
    """Whether gradients are made in backward."""
    return reduction == "none" or dtype == torch.float16


def _chunks(
    wanted: tuple[bool, bool, bool],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    normaliser: Tensor,
    buffers: RowBuffers,
    options: Options,
    accumulation_dtype: torch.dtype | None,
    memory_budget: int | None,
    *,
    wants_loss: bool,
    output_gradient: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Run over the chunks; fill the buffers (`wants_loss`) and return the wanted gradients of hidden, weight and bias."""
    wants_hidden, wants_weight, wants_bias = wanted
    d_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if wants_hidden else None
    d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if bias is not None and wants_bias else None
    d_weight = (
        torch.empty(weight.shape, dtype=accumulation_dtype or weight.dtype, device=weight.device) if wants_weight else None
    )
    if not is_traced(hidden):
        size = contract.chunk_rows(hidden.shape[0], weight.shape[0], hidden.element_size(), memory_budget)
        pieces = _pieces(weight.shape[0], hidden.element_size())
        buffer = _logits_buffer(min(size, hidden.shape[0]), weight.shape[0], hidden)
        for start in range(0, max(hidden.shape[0], 1), size):
            end = min(start + size, hidden.shape[0])
            rows, logits = hidden[start:end], buffer[: end - start]
            for piece in pieces:
                _logits(rows, weight[piece], None if bias is None else bias[piece], logits[:, piece])
            launch_rows(
                logits, targets[start:end], class_weight, normaliser, buffers.rows(start, end), options, wants_loss=wants_loss,
                gradient=logits if any(wanted) else None,
                output_gradient=output_gradient if output_gradient is None or output_gradient.dim() == 0
                else output_gradient[start:end],
            )  # fmt: skip
            if d_hidden is not None:
                _hidden_gradient(logits, weight, pieces, d_hidden[start:end])
            if d_weight is not None:
                for piece in pieces:
                    _accumulate(d_weight[piece], logits[:, piece], rows, start == 0)
            if d_bias is not None:
                d_bias += logits.sum(0, dtype=torch.float32)
        del buffer, logits  # before d_weight is rounded, which takes as much memory again
    return (
        d_hidden,
        None if d_weight is None else d_weight.to(weight.dtype),
        None if d_bias is None or bias is None else d_bias.to(bias.dtype),
    )


def _logits_buffer(rows: int, vocabulary: int, like: Tensor) -> Tensor:
    """[rows, vocabulary], each row aligned, so that kernels and matrix products read whole vectors."""
    return torch.empty((rows, -(-vocabulary // 16) * 16), dtype=like.dtype, device=like.device)[:, :vocabulary]


def _pieces(vocabulary: int, element_size: int) -> list[slice]:
    """The vocabulary in one piece; or a small one and the rest, which is a multiple of 16 bytes.

    Where the vocabulary is none, cuBLAS takes kernels of older GPUs, whatever the strides: with the 151674 tokens of InternVL3
    the head's three products took 50 ms of a step on an H200, and 24 in pieces.
    """
    aligned = vocabulary - vocabulary % (16 // element_size)
    return [slice(0, vocabulary)] if aligned in (0, vocabulary) else [slice(aligned, vocabulary), slice(0, aligned)]


def _hidden_gradient(d_logits: Tensor, weight: Tensor, pieces: list[slice], out: Tensor) -> None:
    """out = d_logits · weight. The small piece comes first: what its rounding adds is as small."""
    first, *rest = pieces
    torch.mm(d_logits[:, first], weight[first], out=out)
    for piece in rest:
        out.addmm_(d_logits[:, piece], weight[piece])


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def _accumulate(d_weight: Tensor, d_logits: Tensor, hidden: Tensor, first: bool) -> None:
    """d_weight (+)= d_logitsᵀ · hidden without a temporary of its size."""
    if d_weight.dtype == hidden.dtype:
        if first:
            torch.mm(d_logits.t(), hidden, out=d_weight)
        else:
            d_weight.addmm_(d_logits.t(), hidden)
    elif d_weight.dtype == torch.float32 and _mixed_products(hidden.device, hidden.dtype):
        if first:
            torch.mm(d_logits.t(), hidden, out_dtype=torch.float32, out=d_weight)
        else:
            torch.addmm(d_weight, d_logits.t(), hidden, out_dtype=torch.float32, out=d_weight)
    else:
        if first:
            d_weight.zero_()
        for start in range(0, hidden.shape[0], UPCAST_ROWS):
            end = start + UPCAST_ROWS
            d_weight.addmm_(d_logits[start:end].t().to(d_weight.dtype), hidden[start:end].to(d_weight.dtype))


@functools.cache
def _mixed_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch adds products of this dtype to an fp32 matrix on this device (CUDA, compute capability 8 and later)."""
    left, total = torch.ones(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.mm(left.t(), left, out_dtype=torch.float32, out=total)
        torch.addmm(total, left.t(), left, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # no such kernel, no such overload
        return False
    return True
