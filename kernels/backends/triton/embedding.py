"""Embedding: torch gathers (it runs at the speed of a copy); Triton sums the gradient, deterministically and in fp32.

torch's own backward for at most 3072 indices adds groups of duplicates in the weight's dtype; index_add_ is exact in fp32 only,
with a second [vocabulary, hidden] buffer, and its order of additions changes from run to run.
"""

import torch
import triton
import triton.language as tl

from liger_models.kernels.backends.triton.launch import launch, next_power_of_2, rows_of


@triton.jit(do_not_specialize=["padding_index"])
def _backward_kernel(
    dy_ptr, index_ptr, order_ptr, end_ptr, dweight_ptr, dy_stride, hidden, padding_index,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The program at the first of equal sorted indices sums the rows of them all; the others have nothing to do."""
    start = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + start)
    before = tl.load(index_ptr + start - 1, mask=start > 0, other=-1)
    if (index != before) & (index != padding_index):
        end = tl.load(end_ptr + start)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in range(start, end, ROWS):
            place = first + tl.arange(0, ROWS)[:, None]
            row = tl.load(order_ptr + place, mask=place < end, other=0)
            dy = tl.load(dy_ptr + row * dy_stride + columns, mask=(place < end) & (columns < hidden), other=0.0)
            total += dy.to(tl.float32)
        summed = tl.sum(total, axis=0)[None, :].to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + index.to(tl.int64) * hidden + columns, summed, mask=columns < hidden)


def refuses(indices, weight, padding_idx):
    if weight.dtype == torch.float64:
        return "float64 weight: the kernel computes in float32"
    return None


def forward(needs, indices, weight, padding_idx):
    return torch.nn.functional.embedding(indices, weight, padding_idx), ()


def backward(needs, gradients, *, indices, weight, padding_idx):
    dy = rows_of(gradients[0])
    vocabulary, hidden = weight.shape
    dweight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    index, order = torch.sort(indices.reshape(-1), stable=True)
    end = torch.searchsorted(index, index, right=True)
    padding = -1 if padding_idx is None else padding_idx % vocabulary
    rows, block = 8, min(next_power_of_2(hidden), 256)
    launch(
        _backward_kernel, (index.shape[0], triton.cdiv(hidden, block)),
        dy, index, order, end, dweight, dy.stride(0), hidden, padding,
        ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return (dweight,)
