"""The routed experts: rows gathered into the order of their experts, grouped products, and Triton kernels between them.

A row is a token for one of its slots. Rows are sorted by expert, so that an expert's rows lie together. What depends on the
routing is read on the device: the host never waits. No kernel adds with atomics: results are the same in every run.

Backward keeps the projection to gate and up (without its bias) and the routing beside the arguments. It does not make the
experts' outputs again: with d = grad_output @ down_weight[e], the gradient of a row's weight is dot(activation, d) +
dot(grad_output, down_bias[e]), and the gradient of its activation is its weight times d.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_models.kernels.backends.triton.activations import refuses_dtype
from liger_models.kernels.backends.triton.grouped_product import rows_by_rows, rows_by_weights
from liger_models.kernels.backends.triton.launch import launch, next_power_of_2, rows_of
from liger_models.kernels.fused_moe import check_arguments

TILE = 2048  # elements per program: two 16-byte loads of half precision per thread and operand at 4 warps


def refuses(
    x, expert_ids, expert_weights, gate_up_weight, down_weight, gate_up_bias, down_bias, alpha, limit, up_offset
):  # fmt: skip
    return refuses_dtype(x, expert_weights, gate_up_weight, down_weight, gate_up_bias, down_bias)


def forward(
    needs, x, expert_ids, expert_weights, gate_up_weight, down_weight, gate_up_bias, down_bias, alpha, limit, up_offset
):  # fmt: skip
    check_arguments(x, expert_ids, expert_weights, gate_up_weight, down_weight, gate_up_bias, down_bias)
    routing = _route(expert_ids, down_weight.shape[0])
    h = rows_by_weights(_gather(x, routing), gate_up_weight.transpose(1, 2), routing.ends)
    activated = _activated(h, gate_up_bias, routing, alpha, limit, up_offset)
    if not any(needs[:5]):
        h = None  # at most the gradient of down_bias is wanted: free before the second product
    y = rows_by_weights(activated, down_weight.transpose(1, 2), routing.ends)
    del activated
    output = _combined(y, routing, expert_weights, down_bias)
    return output, (routing.order, routing.place, routing.ends, h) if any(needs) else (None,) * 4


def backward(
    needs, gradients, *, x, expert_ids, expert_weights, gate_up_weight, down_weight, gate_up_bias, down_bias,
    alpha, limit, up_offset, order, place, ends, h,
):  # fmt: skip
    dy, routing = rows_of(gradients[0]), Routing(expert_ids, order, place, ends)
    d_down_bias = _sum_by_expert(dy, routing, down_bias.dtype, expert_weights) if needs.down_bias else None
    if not any(needs[:5]):
        return None, None, None, None, None, d_down_bias
    dy_rows = _gather(dy, routing)
    wants_dh = needs.x or needs.gate_up_weight or needs.gate_up_bias
    d_activated = rows_by_weights(dy_rows, down_weight, ends) if wants_dh or needs.expert_weights else None
    dh, activated, d_expert_weights = _through_activation(
        needs, d_activated, h, gate_up_bias, dy, down_bias, expert_weights, routing, alpha, limit, up_offset
    )
    del d_activated
    d_down_weight = rows_by_rows(dy_rows, activated, ends) if needs.down_weight else None
    del dy_rows, activated
    d_gate_up_bias = _sum_by_expert(dh, routing, gate_up_bias.dtype) if needs.gate_up_bias else None
    d_gate_up_weight = rows_by_rows(dh, _gather(x, routing), ends) if needs.gate_up_weight else None
    dx = _combined(rows_by_weights(dh, gate_up_weight, ends), routing) if needs.x else None
    return dx, d_expert_weights, d_gate_up_weight, d_down_weight, d_gate_up_bias, d_down_bias


# ---------------------------------------------------------------------------------------------------------------------
# Routing


class Routing(NamedTuple):
    """Which row belongs to which slot. A slot is an element of expert_ids, numbered along the tokens.

    Attributes:
        expert_ids: [tokens, top_k].
        order: int32 [rows], the slot of each row.
        place: int32 [rows], the row of each slot.
        ends: int32 [experts], where each expert's rows end. Rows after the last end belong to no expert here.
    """

    expert_ids: Tensor
    order: Tensor
    place: Tensor
    ends: Tensor

    @property
    def top_k(self) -> int:
        return self.expert_ids.shape[1]

    @property
    def experts(self) -> int:
        return self.ends.shape[0]

    @property
    def expert_of_slot(self) -> Tensor:
        return self.expert_ids.reshape(-1)


def _route(expert_ids: Tensor, experts: int) -> Routing:
    expert_of_row, order = torch.sort(expert_ids.reshape(-1), stable=True)
    experts_here = torch.arange(experts, dtype=expert_of_row.dtype, device=expert_of_row.device)
    ends = torch.searchsorted(expert_of_row, experts_here, right=True, out_int32=True)
    rows = order.shape[0]
    slot_of_row, row_of_slot = (torch.empty(rows, dtype=torch.int32, device=order.device) for _ in range(2))
    launch(_place_kernel, (triton.cdiv(rows, 1024),), order, slot_of_row, row_of_slot, rows, BLOCK=1024, num_warps=4)
    return Routing(expert_ids, slot_of_row, row_of_slot, ends)


def _gather(tokens: Tensor, routing: Routing) -> Tensor:
    """[rows, hidden]: the token of each row."""
    tokens, rows, hidden = rows_of(tokens), routing.order.shape[0], tokens.shape[1]
    out = torch.empty(rows, hidden, dtype=tokens.dtype, device=tokens.device)
    launch(
        _gather_kernel, _grid(rows, hidden), tokens, routing.order, out, tokens.stride(0), rows, hidden,
        TOP_K=routing.top_k, **_tile(hidden),
    )  # fmt: skip
    return out


def _combined(
    y: Tensor, routing: Routing, expert_weights: Tensor | None = None, down_bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    """[tokens, hidden]: the sum of a token's rows, with a bias each and weighted, where given."""
    tokens, hidden = routing.expert_ids.shape[0], y.shape[1]
    out = torch.empty(tokens, hidden, dtype=y.dtype, device=y.device)
    launch(
        _combine_kernel, _grid(tokens, hidden), y, routing.expert_of_slot, routing.place, _flat(expert_weights),
        _flat(down_bias), out, tokens, hidden, routing.experts, TOP_K=routing.top_k,
        HAS_WEIGHT=expert_weights is not None, HAS_BIAS=down_bias is not None, **_tile(hidden),
    )  # fmt: skip
    return out


def _sum_by_expert(
    tensor: Tensor, routing: Routing, dtype: torch.dtype, expert_weights: Tensor | None = None
) -> Tensor:  # fmt: skip
    """[experts, width]: the sum of each expert's rows of a tensor, or with `expert_weights` of its tokens, each weighted."""
    width = tensor.shape[1]
    out = torch.empty(routing.experts, width, dtype=dtype, device=tensor.device)
    launch(
        _sum_by_expert_kernel, (triton.cdiv(width, 128), routing.experts), tensor, routing.order, routing.ends,
        _flat(expert_weights), out, tensor.stride(0), width, TOP_K=routing.top_k,
        HAS_WEIGHT=expert_weights is not None, ROWS=16, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Activation


def _activated(h: Tensor, gate_up_bias: Tensor | None, routing: Routing, alpha, limit, up_offset) -> Tensor:
    rows, width = h.shape[0], h.shape[1] // 2
    out = torch.empty(rows, width, dtype=h.dtype, device=h.device)
    launch(
        _activate_kernel, _grid(rows, width), h, _flat(gate_up_bias), routing.expert_of_slot, routing.order, out,
        rows, width, routing.experts, float(alpha), float(limit or 0.0), float(up_offset),
        HAS_BIAS=gate_up_bias is not None, HAS_LIMIT=limit is not None, **_tile(width),
    )  # fmt: skip
    return out


def _through_activation(
    needs, d_activated: Tensor | None, h: Tensor, gate_up_bias, dy: Tensor, down_bias, expert_weights: Tensor,
    routing: Routing, alpha, limit, up_offset,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradient of `h`, the activation times the row's weight and the gradient of expert_weights, each if it is wanted.

    Without a need for the others' `d_activated` is None; the activation is written over it where both exist.
    """
    rows, width, hidden = h.shape[0], h.shape[1] // 2, dy.shape[1]
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device) if needs.x or needs.gate_up_weight or needs.gate_up_bias else None
    activated = None
    if needs.down_weight:
        activated = torch.empty(rows, width, dtype=h.dtype, device=h.device) if d_activated is None else d_activated
    d_weights = None
    if needs.expert_weights:
        d_weights = torch.empty(expert_weights.shape, dtype=expert_weights.dtype, device=h.device)
    launch(
        _activate_gradient_kernel, (rows,), h, _flat(gate_up_bias), d_activated, dy, _flat(down_bias), _flat(expert_weights),
        routing.expert_of_slot, routing.order, dh, activated, d_weights, dy.stride(0), width, hidden, routing.experts,
        float(alpha), float(limit or 0.0), float(up_offset), TOP_K=routing.top_k,
        HAS_BIAS=gate_up_bias is not None, HAS_DOWN_BIAS=down_bias is not None, HAS_LIMIT=limit is not None,
        WANTS_DH=dh is not None, WANTS_ACTIVATED=activated is not None, WANTS_WEIGHT=d_weights is not None,
        BLOCK=min(next_power_of_2(max(width, 1)), 1024), num_warps=4,
    )  # fmt: skip
    return dh, activated, d_weights


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.reshape(-1)


def _tile(width: int) -> dict[str, int]:
    columns = min(next_power_of_2(max(width, 1)), TILE)
    return {"BLOCK_ROWS": TILE // columns, "BLOCK_COLUMNS": columns, "num_warps": 4}


def _grid(rows: int, width: int) -> tuple[int, int]:
    tile = _tile(width)
    return triton.cdiv(rows, tile["BLOCK_ROWS"]), triton.cdiv(width, tile["BLOCK_COLUMNS"])


# ---------------------------------------------------------------------------------------------------------------------
# Kernels. Numbers of rows and tokens are not specialised, or the first lengths of 1 and of a multiple of 16 compile anew.


@triton.jit(do_not_specialize=["rows"])
def _place_kernel(order_ptr, slot_of_row_ptr, row_of_slot_ptr, rows, BLOCK: tl.constexpr):
    """The order of rows in 32 bits, and its inverse."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(order_ptr + row, mask=row < rows, other=0)
    tl.store(slot_of_row_ptr + row, slot.to(tl.int32), mask=row < rows)
    tl.store(row_of_slot_ptr + slot, row, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _gather_kernel(
    token_ptr, order_ptr, out_ptr, token_stride, rows, hidden,
    TOP_K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, mask = _tile_indices(rows, hidden, BLOCK_ROWS, BLOCK_COLUMNS)
    token = tl.load(order_ptr + row, mask=row < rows, other=0).to(tl.int64) // TOP_K
    value = tl.load(token_ptr + token * token_stride + column, mask=mask, other=0.0)
    tl.store(out_ptr + row * hidden + column, value, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _combine_kernel(
    y_ptr, expert_ptr, place_ptr, weight_ptr, bias_ptr, out_ptr, tokens, hidden, experts,
    TOP_K: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    token, column, mask = _tile_indices(tokens, hidden, BLOCK_ROWS, BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for k in tl.static_range(TOP_K):
        slot = token * TOP_K + k
        expert = tl.load(expert_ptr + slot, mask=token < tokens, other=0).to(tl.int64)
        served = mask & (expert < experts)  # the rows of others were never written
        row = tl.load(place_ptr + slot, mask=token < tokens, other=0).to(tl.int64)
        y = tl.load(y_ptr + row * hidden + column, mask=served, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + expert * hidden + column, mask=served, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + slot, mask=(token < tokens) & (expert < experts), other=0.0).to(tl.float32)
        total += y
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_by_expert_kernel(
    tensor_ptr, order_ptr, end_ptr, weight_ptr, out_ptr, stride, width,
    TOP_K: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With weights, a row of the tensor is a token; without, it is a row."""
    expert = tl.program_id(1).to(tl.int64)
    begin = tl.load(end_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(end_ptr + expert)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(begin, end, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < end) & (column < width)
        if HAS_WEIGHT:
            slot = tl.load(order_ptr + row, mask=row < end, other=0).to(tl.int64)
            value = tl.load(tensor_ptr + slot // TOP_K * stride + column, mask=mask, other=0.0).to(tl.float32)
            total += value * tl.load(weight_ptr + slot, mask=row < end, other=0.0).to(tl.float32)
        else:
            total += tl.load(tensor_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    summed = tl.sum(total, axis=0)[None, :].to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + expert * width + column, summed, mask=column < width)


@triton.jit(do_not_specialize=["rows"])
def _activate_kernel(
    h_ptr, bias_ptr, expert_ptr, order_ptr, out_ptr, rows, width, experts, alpha, limit, up_offset,
    HAS_BIAS: tl.constexpr, HAS_LIMIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, mask = _tile_indices(rows, width, BLOCK_ROWS, BLOCK_COLUMNS)
    slot = tl.load(order_ptr + row, mask=row < rows, other=0)
    expert = tl.load(expert_ptr + slot, mask=row < rows, other=0).to(tl.int64)
    gate, up = _gate_and_up(h_ptr, bias_ptr, row, expert, column, width, mask & (expert < experts), HAS_BIAS)
    gate, up = _clamped(gate, up, limit, HAS_LIMIT)
    out = (up + up_offset) * gate / (1.0 + tl.exp(-alpha * gate))
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _activate_gradient_kernel(
    h_ptr, bias_ptr, d_activated_ptr, dy_ptr, down_bias_ptr, weight_ptr, expert_ptr, order_ptr,
    dh_ptr, activated_ptr, d_weight_ptr, dy_stride, width, hidden, experts, alpha, limit, up_offset,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOWN_BIAS: tl.constexpr, HAS_LIMIT: tl.constexpr,
    WANTS_DH: tl.constexpr, WANTS_ACTIVATED: tl.constexpr, WANTS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. `activated` may lie over `d_activated`: a block is read before it is written."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order_ptr + row).to(tl.int64)
    expert = tl.load(expert_ptr + slot).to(tl.int64)
    served = expert < experts  # another row's gradient has no value; it gets a weight gradient of zero
    weight = tl.load(weight_ptr + slot, mask=served, other=0.0).to(tl.float32)
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = (column < width) & served
        free_gate, free_up = _gate_and_up(h_ptr, bias_ptr, row, expert, column, width, mask, HAS_BIAS)
        gate, up = _clamped(free_gate, free_up, limit, HAS_LIMIT)
        sigmoid = 1.0 / (1.0 + tl.exp(-alpha * gate))
        activated = (up + up_offset) * gate * sigmoid
        if WANTS_DH or WANTS_WEIGHT:
            d_activated = tl.load(d_activated_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        if WANTS_WEIGHT:
            dot += activated * d_activated
        if WANTS_DH:
            slope = sigmoid * (1.0 + alpha * gate * (1.0 - sigmoid))
            d_gate = weight * d_activated * (up + up_offset) * slope
            d_up = weight * d_activated * gate * sigmoid
            if HAS_LIMIT:  # the gradient passes on the limit itself
                d_gate = tl.where(free_gate <= limit, d_gate, 0.0)
                d_up = tl.where(tl.abs(free_up) <= limit, d_up, 0.0)
            dh_row = dh_ptr + row * 2 * width + column
            tl.store(dh_row, d_gate.to(dh_ptr.dtype.element_ty), mask=mask)
            tl.store(dh_row + width, d_up.to(dh_ptr.dtype.element_ty), mask=mask)
        if WANTS_ACTIVATED:
            tl.debug_barrier()  # every thread has read its part of d_activated
            tl.store(activated_ptr + row * width + column, (weight * activated).to(activated_ptr.dtype.element_ty), mask=mask)
    if WANTS_WEIGHT:
        if HAS_DOWN_BIAS:
            for start in range(0, hidden, BLOCK):
                column = start + tl.arange(0, BLOCK)
                mask = (column < hidden) & served
                dy = tl.load(dy_ptr + slot // TOP_K * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
                dot += dy * tl.load(down_bias_ptr + expert * hidden + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_weight_ptr + slot, tl.sum(dot, axis=0).to(d_weight_ptr.dtype.element_ty))


@triton.jit
def _gate_and_up(h_ptr, bias_ptr, row, expert, column, width, mask, HAS_BIAS: tl.constexpr):
    gate = tl.load(h_ptr + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + expert * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + expert * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _clamped(gate, up, limit, HAS_LIMIT: tl.constexpr):
    """Gate and up within the limit. NaN stays NaN."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, up


@triton.jit
def _tile_indices(rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Row numbers (64-bit: an offset can pass 2**31), column numbers and the mask of this program's tile."""
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :]
    return row, column, (row < rows) & (column < width)
