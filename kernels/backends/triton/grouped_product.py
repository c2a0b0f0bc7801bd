"""Products of rows with a matrix per group, where a group is a run of consecutive rows whose end only the device knows.

In bf16 on NVIDIA GPUs from compute capability 9.0 on they are torch's, at the speed of a plain product. Elsewhere they are two
plain Triton kernels. Both accumulate in fp32 and round once, in an order that is the same in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_models.kernels.backends.triton.launch import is_traced, launch, next_power_of_2

ALIGNMENT = 8  # bf16 elements in the 16 bytes whose multiples torch's grouped product wants strides and addresses to be


def rows_by_weights(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`rows[start:end] @ weights[group]` for each group.

    Args:
        rows: [count, inner], the groups' rows one group after the other.
        weights: [groups, inner, width] in any layout.
        ends: int32 [groups], where each group's rows end; the first starts at zero, every other where the one before ends.

    Returns:
        [count, width]; rows after the last end are not written.
    """
    count, groups, inner, width = rows.shape[0], *weights.shape
    if _has_library_product(rows, weights, width=width):
        return torch._grouped_mm(rows, weights, offs=ends)
    out = torch.empty(count, width, dtype=rows.dtype, device=rows.device)
    tile = _tile(rows.dtype)
    # each group's last tile may be a part of one
    grid = (triton.cdiv(count, tile["BLOCK_ROWS"]) + groups, triton.cdiv(width, tile["BLOCK_WIDTH"]))
    launch(
        _rows_by_weights_kernel, grid, rows, weights, ends, out, groups, inner, width,
        *rows.stride(), *weights.stride(), GROUPS_BLOCK=max(next_power_of_2(groups), 32), **tile,
    )  # fmt: skip
    return out


def rows_by_rows(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`left[start:end].T @ right[start:end]` for each group: [groups, height, width], zeros for a group without rows.

    Args:
        left: [count, height], the groups' rows one group after the other.
        right: [count, width].
        ends: int32 [groups], where each group's rows end.
    """
    groups, height, width = ends.shape[0], left.shape[1], right.shape[1]
    if _has_library_product(left.t(), right, width=width):
        out = torch._grouped_mm(left.t(), right, offs=ends)
        if torch.cuda.get_device_capability(left.device) >= (10, 0):
            # https://github.com/pytorch/pytorch/issues/172439: there a group without rows is not zero
            out.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
        return out
    out = torch.empty(groups, height, width, dtype=left.dtype, device=left.device)
    tile = _tile(left.dtype)
    grid = (triton.cdiv(height, tile["BLOCK_ROWS"]), triton.cdiv(width, tile["BLOCK_WIDTH"]), groups)
    launch(
        _rows_by_rows_kernel, grid, left, right, ends, out, height, width, *left.stride(), *right.stride(), **tile
    )  # fmt: skip
    return out


def _has_library_product(left: Tensor, right: Tensor, width: int) -> bool:
    if left.device.type != "cuda" or torch.version.hip is not None or is_traced(left) or not hasattr(torch, "_grouped_mm"):
        return False
    if left.dtype != torch.bfloat16 or torch.cuda.get_device_capability(left.device) < (9, 0):
        return False
    return left.numel() > 0 and width % ALIGNMENT == 0 and _is_aligned(left) and _is_aligned(right)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether one of the last two dimensions is dense and every other step is a multiple of 16 bytes."""
    *outer, a, b = tensor.stride()
    steps = [*outer, max(a, b), tensor.data_ptr() // tensor.element_size()]
    return min(a, b) == 1 and all(step % ALIGNMENT == 0 for step in steps)


def _tile(dtype: torch.dtype) -> dict[str, int]:
    """Blocks that fit the 64 KiB of every supported device, with the loads in flight."""
    if dtype == torch.float32:
        return {"BLOCK_ROWS": 64, "BLOCK_WIDTH": 64, "BLOCK_INNER": 32, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_ROWS": 64, "BLOCK_WIDTH": 128, "BLOCK_INNER": 32, "num_warps": 4, "num_stages": 3}


@triton.jit
def _rows_by_weights_kernel(
    rows_ptr, weight_ptr, end_ptr, out_ptr, groups, inner, width,
    row_stride, row_inner_stride, group_stride, inner_stride, width_stride,
    GROUPS_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    group, first, end = _group_of_tile(end_ptr, groups, tl.program_id(0), GROUPS_BLOCK, BLOCK_ROWS)
    if group < groups:
        row = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
        column = tl.program_id(1).to(tl.int64) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
        weight_columns = weight_ptr + group.to(tl.int64) * group_stride + column * width_stride
        row_starts = rows_ptr + row * row_stride
        total = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
        for start in range(0, inner, BLOCK_INNER):
            along = (start + tl.arange(0, BLOCK_INNER)).to(tl.int64)
            left_mask, right_mask = (row < end) & (along < inner)[None, :], (along < inner)[:, None] & (column < width)
            left = tl.load(row_starts + along[None, :] * row_inner_stride, mask=left_mask, other=0.0)
            right = tl.load(weight_columns + along[:, None] * inner_stride, mask=right_mask, other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=(row < end) & (column < width))


@triton.jit
def _group_of_tile(end_ptr, groups, tile, GROUPS_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The group of a tile when each group has its own tiles, the tile's first row and the group's end.

    For a tile after the last one the group is at least `groups`.
    """
    group = tl.arange(0, GROUPS_BLOCK)
    end = tl.load(end_ptr + group, mask=group < groups, other=0)
    start = tl.load(end_ptr + group - 1, mask=(group > 0) & (group < groups), other=0)
    tiles = tl.cdiv(end - start, BLOCK_ROWS)
    through = tl.cumsum(tiles, axis=0)  # how many tiles there are up to this group
    mine = tl.sum((through <= tile).to(tl.int32), axis=0)
    is_mine = group == mine
    first = tl.sum(tl.where(is_mine, start + (tile - through + tiles) * BLOCK_ROWS, 0), axis=0)
    return mine, first, tl.sum(tl.where(is_mine, end, 0), axis=0)


@triton.jit
def _rows_by_rows_kernel(
    left_ptr, right_ptr, end_ptr, out_ptr, height, width, left_stride, height_stride, right_stride, width_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(2).to(tl.int64)
    begin = tl.load(end_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(end_ptr + group)
    line = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)).to(tl.int64)[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
    for start in range(begin, end, BLOCK_INNER):
        row = (start + tl.arange(0, BLOCK_INNER)).to(tl.int64)
        left_mask, right_mask = (line < height) & (row < end)[None, :], (row < end)[:, None] & (column < width)
        left = tl.load(left_ptr + row[None, :] * left_stride + line * height_stride, mask=left_mask, other=0.0)
        right = tl.load(right_ptr + row[:, None] * right_stride + column * width_stride, mask=right_mask, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    out_ptr += (group * height + line) * width + column
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty), mask=(line < height) & (column < width))
