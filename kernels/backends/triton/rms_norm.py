"""RMSNorm in Triton, with or without a residual to add first.

Forwards a program normalises a tile of rows. Backwards a few programs per multiprocessor walk over the tiles, the loads of the
next tiles in flight while one is computed, and each keeps a partial weight gradient in registers.
"""

import torch
import triton
import triton.language as tl

from liger_models.kernels.backends.triton.launch import launch, multiprocessors, next_power_of_2, rows_of, shared_memory

MAX_HIDDEN = 65536


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, summed_ptr, rstd_ptr, x_stride, residual_stride, rows, hidden, eps, offset,
    SCALE_IN_FP32: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # 64-bit: row offsets can pass 2**31
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (columns < hidden)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + row * hidden + columns, x, mask=mask)
    x_fp32 = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x_fp32 * x_fp32, axis=1)[:, None] / hidden + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = x_fp32 * rstd
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=columns < hidden, other=0.0)
        if SCALE_IN_FP32:
            y = y * (weight.to(tl.float32) + offset)
        else:
            y = y.to(x.dtype).to(tl.float32) * (weight.to(tl.float32) + offset).to(weight.dtype).to(tl.float32)
    tl.store(y_ptr + row * hidden + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    dy_ptr, dsummed_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dweight_ptr, dy_stride, dsummed_stride, x_stride,
    rows, hidden, offset,
    SCALE_IN_FP32: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)  # 64-bit: row offsets can pass 2**31
    columns = tl.arange(0, BLOCK)[None, :]
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=columns < hidden, other=0.0)
        if SCALE_IN_FP32:
            scale = weight.to(tl.float32) + offset
        else:
            scale = (weight.to(tl.float32) + offset).to(weight.dtype).to(tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (columns < hidden)
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normalised = x.to(tl.float32) * rstd
        if dweight_ptr is not None:
            dweight += dy * (normalised if SCALE_IN_FP32 else normalised.to(x.dtype).to(tl.float32))
        if dx_ptr is not None:
            scaled = dy if weight_ptr is None else dy * scale
            dx = rstd * (scaled - normalised * (tl.sum(scaled * normalised, axis=1)[:, None] / hidden))
            if dsummed_ptr is not None:
                dx += tl.load(dsummed_ptr + row * dsummed_stride + columns, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row * hidden + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dweight_ptr is not None:
        total = tl.sum(dweight, axis=0)[None, :]
        tl.store(dweight_ptr + program * hidden + columns, total, mask=columns < hidden)


def refuses(x, weight, eps, offset, scale_in_fp32):
    if x.dtype == torch.float64 or (weight is not None and weight.dtype == torch.float64):
        return "float64 input: the kernel computes in float32"
    if not 0 < x.shape[-1] <= MAX_HIDDEN:
        return f"hidden size {x.shape[-1]}, not 1 to {MAX_HIDDEN}: a row must fit one program's registers"
    return None


def forward(needs, x, weight, eps, offset, scale_in_fp32):
    y, _, rstd = normalise(x, None, weight, eps, offset, scale_in_fp32)
    return y, (rstd,)


def backward(needs, gradients, *, x, weight, offset, scale_in_fp32, rstd):
    return input_gradients(gradients[0], None, x, weight, offset, scale_in_fp32, rstd, needs.x, needs.weight)


def normalise(x, residual, weight, eps, offset, scale_in_fp32):
    """(normed, x + residual or None, reciprocal root mean square of each row), all contiguous."""
    rows, summed, residual_rows = rows_of(x), None, None
    weight = None if weight is None else weight.contiguous()
    dtype = x.dtype
    if residual is not None:
        dtype, residual_rows = torch.promote_types(x.dtype, residual.dtype), rows_of(residual)
        summed = torch.empty(x.shape, dtype=dtype, device=x.device)
    if weight is not None and not scale_in_fp32:
        y = torch.empty(x.shape, dtype=torch.promote_types(dtype, weight.dtype), device=x.device)
    else:
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
    count, hidden = rows.shape
    rstd = torch.empty(count, dtype=torch.float32, device=x.device)
    tile_rows, block, warps = forward_tile(hidden)
    launch(
        _forward_kernel, (triton.cdiv(count, tile_rows),), rows, residual_rows, weight, y, summed, rstd,
        rows.stride(0), 0 if residual is None else residual_rows.stride(0), count, hidden, eps, offset,
        SCALE_IN_FP32=scale_in_fp32, ROWS=tile_rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y, summed, rstd


def input_gradients(dy, dsummed, x, weight, offset, scale_in_fp32, rstd, wants_dx, wants_dweight):
    """(gradient of x or None, gradient of the weight or None); `dsummed` is added to the gradient of x if it is given."""
    rows, dy, dsummed = rows_of(x), rows_of(dy), None if dsummed is None else rows_of(dsummed)
    weight = None if weight is None else weight.contiguous()
    count, hidden = rows.shape
    tile_rows, block, warps, stages, per_multiprocessor = backward_tile(
        hidden, rows.element_size() + dy.element_size(), shared_memory(x.device)
    )
    programs = min(triton.cdiv(count, tile_rows), per_multiprocessor * multiprocessors(x.device))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wants_dx else None
    partial = torch.empty(programs, hidden, dtype=torch.float32, device=x.device) if wants_dweight else None
    launch(
        _backward_kernel, (programs,), dy, dsummed, rows, weight, rstd, dx, partial,
        dy.stride(0), 0 if dsummed is None else dsummed.stride(0), rows.stride(0), count, hidden, offset,
        SCALE_IN_FP32=scale_in_fp32, ROWS=tile_rows, BLOCK=block, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return dx, (partial.sum(0).to(weight.dtype) if wants_dweight else None)


def forward_tile(hidden: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program: 16 elements per thread, at least 2048 elements (16-byte accesses, few programs)."""
    block = next_power_of_2(hidden)
    rows = max(1, 2048 // block)
    return rows, block, min(max(rows * block // 512, 4), 32)


def backward_tile(hidden: int, bytes_per_column: int, shared: int) -> tuple[int, int, int, int, int]:
    """(rows, columns, warps, pipeline stages, programs per multiprocessor).

    A thread holds 16 elements of x, of the gradient, of the scale and of the weight's gradient: about 100 registers, so 16
    warps fill a multiprocessor, as two programs where rows are short enough. Loads in flight wait in shared memory, of
    which each program takes its part, less what its reductions need.

    Args:
        hidden: columns of a row.
        bytes_per_column: of x and the gradient together.
        shared: bytes of shared memory per multiprocessor.
    """
    block = next_power_of_2(hidden)
    rows = max(1, 4096 // block)
    programs = 2 if block <= 4096 else 1
    stages = (shared // programs - 4096) // (rows * block * bytes_per_column)
    return rows, block, min(rows * block // 512, 32), min(max(stages, 1), 3), programs
