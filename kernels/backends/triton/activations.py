"""Gated activations in Triton: the element-wise kernels that swiglu, geglu and gated_mlp share.

Both kernels run over tiles of rows x columns and move every element once: they are bound by memory. The two halves have
their own row strides, so that chunks of a packed tensor are read and written in place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_models.kernels.backends.triton.launch import is_traced, launch, next_power_of_2, rows_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 2048  # elements per program: two 16-byte loads of half precision per thread and operand at 4 warps


def activate(gate: Tensor, up: Tensor, out: Tensor, activation: str) -> None:
    """Write `act(gate) * up` into `out`. All have one shape; `out` has a view as rows."""
    if is_traced(out) or out.numel() == 0:
        return
    gate, up, out = rows_of(gate), rows_of(up), rows_of(out)
    rows, width = out.shape
    launch(
        _activate_kernel, _grid(rows, width), gate, up, out, gate.stride(0), up.stride(0), out.stride(0), rows, width,
        ACTIVATION=activation, **_tile(width),
    )  # fmt: skip


def activate_backward(
    dout: Tensor, gate: Tensor, up: Tensor, dgate: Tensor | None, dup: Tensor | None, out: Tensor | None, activation: str
) -> None:
    """Write the gradients of `act(gate) * up` into `dgate` and `dup`, and the recomputed value into `out`, where given.

    `out` may be `dout` itself: a tile is read before it is written.
    """
    if is_traced(gate) or gate.numel() == 0:
        return
    dout, gate, up, dgate, dup, out = (t if t is None else rows_of(t) for t in (dout, gate, up, dgate, dup, out))
    rows, width = gate.shape
    strides = [0 if t is None else t.stride(0) for t in (dout, gate, up, dgate, dup, out)]
    launch(
        _activate_gradient_kernel, _grid(rows, width), dout, gate, up, dgate, dup, out, *strides, rows, width,
        ACTIVATION=activation, WANTS_DGATE=dgate is not None, WANTS_DUP=dup is not None, WANTS_OUT=out is not None,
        **_tile(width),
    )  # fmt: skip


def refuses_dtype(*tensors: Tensor | None) -> str | None:
    """Why the kernels cannot take tensors of these dtypes, or None."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"{tensor.dtype} input: the kernel computes in float32 on {', '.join(map(str, DTYPES))}"
    return None


def _tile(width: int) -> dict[str, int]:
    columns = min(next_power_of_2(max(width, 1)), TILE)
    return {"BLOCK_ROWS": TILE // columns, "BLOCK_COLUMNS": columns, "num_warps": 4}


def _grid(rows: int, width: int) -> tuple[int, int]:
    tile = _tile(width)
    return triton.cdiv(rows, tile["BLOCK_ROWS"]), triton.cdiv(width, tile["BLOCK_COLUMNS"])


@triton.jit(do_not_specialize=["rows"])  # or the first lengths of 1 and of a multiple of 16 compile anew
def _activate_kernel(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, out_stride, rows, width,
    ACTIVATION: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, mask = _tile_indices(rows, width, BLOCK_ROWS, BLOCK_COLUMNS)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    activated, _ = _activation(gate.to(tl.float32), ACTIVATION)
    out = activated.to(gate.dtype).to(tl.float32) * up
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])  # or the first lengths of 1 and of a multiple of 16 compile anew
def _activate_gradient_kernel(
    dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, out_ptr,
    dout_stride, gate_stride, up_stride, dgate_stride, dup_stride, out_stride, rows, width,
    ACTIVATION: tl.constexpr, WANTS_DGATE: tl.constexpr, WANTS_DUP: tl.constexpr, WANTS_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, mask = _tile_indices(rows, width, BLOCK_ROWS, BLOCK_COLUMNS)
    dout = tl.load(dout_ptr + row * dout_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0)
    activated, slope = _activation(gate.to(tl.float32), ACTIVATION)
    activated = activated.to(gate.dtype).to(tl.float32)
    if WANTS_DGATE or WANTS_OUT:
        up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if WANTS_DGATE:
        dgate = dout * up * slope
        tl.store(dgate_ptr + row * dgate_stride + column, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if WANTS_DUP:
        tl.store(dup_ptr + row * dup_stride + column, (dout * activated).to(dup_ptr.dtype.element_ty), mask=mask)
    if WANTS_OUT:
        tl.debug_barrier()  # out may be dout: every thread has read its part of the tile
        tl.store(out_ptr + row * out_stride + column, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile_indices(rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Row numbers (64-bit: an offset can pass 2**31), column numbers and the mask of this program's tile."""
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :]
    return row, column, (row < rows) & (column < width)


@triton.jit
def _activation(x, ACTIVATION: tl.constexpr):
    """An activation and its derivative at x, in fp32. What a caller does not use is not computed."""
    if ACTIVATION == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        value = x / (1.0 + tl.exp(-x))
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif ACTIVATION == "gelu":
        # x times the standard normal distribution function; its derivative adds x times the density
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)  # 1 / sqrt(2 pi)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh", "unknown activation")
        # (1 + tanh u) / 2 is the logistic function of 2 u: no tanh is needed, and small values are not lost to 1 - 1
        doubled = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
        below = 1.0 / (1.0 + tl.exp(-doubled))
        value = x * below
        slope = below + x * below * (1.0 - below) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return value, slope
