"""RMSNorm in Triton: one program per row forwards; backwards a program per multiprocessor keeps a partial weight gradient."""

import torch
import triton
import triton.language as tl

from liger_models.kernels.backends.triton.launch import launch, multiprocessors, next_power_of_2, rows_of

MAX_HIDDEN = 65536


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, x_stride, hidden, eps, offset,
    HAS_WEIGHT: tl.constexpr, SCALE_IN_FP32: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    x_fp32 = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x_fp32 * x_fp32, axis=0) / hidden + eps)
    tl.store(rstd_ptr + row, rstd)
    y = x_fp32 * rstd
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
        if SCALE_IN_FP32:
            y = y * (weight.to(tl.float32) + offset)
        else:
            y = y.to(x.dtype).to(tl.float32) * (weight.to(tl.float32) + offset).to(weight.dtype).to(tl.float32)
    tl.store(y_ptr + row * hidden + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dweight_ptr, dy_stride, x_stride, rows, hidden, offset,
    HAS_WEIGHT: tl.constexpr, SCALE_IN_FP32: tl.constexpr, WANTS_DX: tl.constexpr, WANTS_DWEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)  # 64-bit: row offsets can pass 2**31
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    dweight = tl.zeros((BLOCK,), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
        if SCALE_IN_FP32:
            scale = weight.to(tl.float32) + offset
        else:
            scale = (weight.to(tl.float32) + offset).to(weight.dtype).to(tl.float32)
    for row in range(program, rows, programs):
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normalised = x.to(tl.float32) * rstd
        if WANTS_DWEIGHT:
            dweight += dy * (normalised if SCALE_IN_FP32 else normalised.to(x.dtype).to(tl.float32))
        if WANTS_DX:
            scaled = dy * scale if HAS_WEIGHT else dy
            dx = rstd * (scaled - normalised * (tl.sum(scaled * normalised, axis=0) / hidden))
            tl.store(dx_ptr + row * hidden + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if WANTS_DWEIGHT:
        tl.store(dweight_ptr + program * hidden + columns, dweight, mask=mask)


def refuses(x, weight, eps, offset, scale_in_fp32):
    if x.dtype == torch.float64:
        return "float64 input: the kernel computes in float32"
    if x.shape[-1] > MAX_HIDDEN:
        return f"hidden size {x.shape[-1]} above {MAX_HIDDEN}: a row must fit one program's registers"
    return None


def forward(needs, x, weight, eps, offset, scale_in_fp32):
    rows = rows_of(x)
    dtype = x.dtype if weight is None or scale_in_fp32 else torch.promote_types(x.dtype, weight.dtype)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    rstd = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    launch(
        _forward_kernel, (rows.shape[0],), rows, weight, y, rstd, rows.stride(0), rows.shape[1], eps, offset,
        HAS_WEIGHT=weight is not None, SCALE_IN_FP32=scale_in_fp32, BLOCK=next_power_of_2(rows.shape[1]),
    )  # fmt: skip
    return y, (rstd,)


def backward(needs, gradients, *, x, weight, offset, scale_in_fp32, rstd):
    rows, dy = rows_of(x), rows_of(gradients[0])
    programs = multiprocessors(x.device)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs.x else None
    partial = torch.empty(programs, rows.shape[1], dtype=torch.float32, device=x.device) if needs.weight else None
    launch(
        _backward_kernel, (programs,), dy, rows, weight, rstd, dx, partial,
        dy.stride(0), rows.stride(0), rows.shape[0], rows.shape[1], offset,
        HAS_WEIGHT=weight is not None, SCALE_IN_FP32=scale_in_fp32, WANTS_DX=needs.x, WANTS_DWEIGHT=needs.weight,
        BLOCK=next_power_of_2(rows.shape[1]),
    )  # fmt: skip
    return dx, (partial.sum(0).to(weight.dtype) if needs.weight else None)
