"""Attention in Triton: an online softmax forwards; backwards one kernel for queries, one for keys and values, no atomics.

A program serves a block of queries of one head, or a block of keys of one key-value head. Of the blocks that it reads, those
that all of its rows see entirely take a path without masks, those that none of its rows sees are skipped, the rest is masked.
Exponentials are base 2, with log2(e) in the factor of the scores.

Source: Dao 2023, arXiv:2307.08691.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from liger_models.kernels.attention import misfit
from liger_models.kernels.backends.triton import launch as hardware
from liger_models.kernels.backends.triton.launch import is_traced, launch, next_power_of_2
from liger_models.kernels.backends.triton.rope import token_major

MAX_HEAD_DIM = 256
FEW_QUERIES = 16  # the least that a matrix product takes: so large is the block for a decoding step
MAX_HEAD_TOGETHER = 128  # up to this head_dim, the sums of dk and dv fit one program's registers

_LOG2E = tl.constexpr(math.log2(math.e))
_LOWEST = tl.constexpr(-1e30)  # finite: a row that saw only masked keys must not give inf - inf
_LAST = tl.constexpr(2**31 - 1)
_BOUNDS = tl.constexpr(4)  # numbers that `bounds` has for each block of queries
# What there is per query is kept in rows of a multiple of 16, the end filled in: loads of several numbers at a time.
_ALIGN = tl.constexpr(16)


# The numbers of queries and keys are not specialised: one compiled kernel serves all lengths.
@triton.jit(do_not_specialize=["interval_batch", "queries", "keys"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, key_mask_ptr, sinks_ptr, output_ptr, log2_sum_ptr,
    q_batch, q_head, q_sequence, q_last, k_batch, k_head, k_sequence, k_last, v_batch, v_head, v_sequence, v_last,
    interval_batch, queries, keys, inner, outer,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    block, head, batch = _query_block(tl.cdiv(queries, QUERIES), HEADS)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + head // GROUP * k_head
    v_ptr += batch * v_batch + head // GROUP * v_head
    start, row = block * QUERIES, block * QUERIES + tl.arange(0, QUERIES)
    first, last = _interval(first_ptr + batch * interval_batch, last_ptr + batch * interval_batch, row, queries, keys)
    if key_mask_ptr is not None:
        key_mask_ptr += batch * keys
    masked, left, from_block, full_from, full = _key_blocks(first, last, row < queries, KEYS, key_mask_ptr is not None)

    q = _tile(q_ptr, start, q_sequence, q_last, queries, HEAD_DIM, QUERIES, HEAD_BLOCK, True)
    accumulator = tl.zeros((QUERIES, HEAD_BLOCK), tl.float32)
    row_max = tl.full((QUERIES,), _LOWEST, tl.float32)
    row_sum = tl.zeros((QUERIES,), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
        row_max = tl.maximum(row_max, sink)
        row_sum += tl.exp2(sink - row_max)
    for index in range(masked):
        key_block = tl.where(index < left, from_block + index, full_from + full + index - left)
        accumulator, row_max, row_sum = _attend(
            accumulator, row_max, row_sum, q, k_ptr, v_ptr, key_mask_ptr, key_block * KEYS, first, last,
            k_sequence, k_last, v_sequence, v_last, keys, inner, outer,
            HEAD_DIM, HAS_SOFTCAP, KEYS, HEAD_BLOCK, True,
        )  # fmt: skip
    for index in range(full):
        accumulator, row_max, row_sum = _attend(
            accumulator, row_max, row_sum, q, k_ptr, v_ptr, None, (full_from + index) * KEYS, first, last,
            k_sequence, k_last, v_sequence, v_last, keys, inner, outer,
            HEAD_DIM, HAS_SOFTCAP, KEYS, HEAD_BLOCK, False,
        )  # fmt: skip

    seen = row_sum > 0.0
    output = accumulator * (1.0 / tl.where(seen, row_sum, 1.0))[:, None]
    output_ptr += (batch * queries * HEADS + head) * HEAD_DIM
    _store(output_ptr, output, start, HEADS * HEAD_DIM, queries, HEAD_DIM, QUERIES, HEAD_BLOCK)
    if log2_sum_ptr is not None:  # +inf where nothing is seen and past the end: the weights in backward are 0 there
        log2_sum = row_max + tl.log2(tl.where(seen, row_sum, 1.0))
        padded = _padded(queries)
        log2_sum = tl.where(seen & (row < queries), log2_sum, float("inf"))
        tl.store(log2_sum_ptr + (batch * HEADS + head) * padded + row, log2_sum, mask=row < padded)


@triton.jit
def _attend(
    accumulator, row_max, row_sum, q, k_ptr, v_ptr, key_mask_ptr, start, first, last,
    k_sequence, k_last, v_sequence, v_last, keys, inner, outer,
    HEAD_DIM: tl.constexpr, HAS_SOFTCAP: tl.constexpr, KEYS: tl.constexpr, HEAD_BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys from `start` on into the softmax of a block of queries."""
    k = _tile(k_ptr, start, k_sequence, k_last, keys, HEAD_DIM, KEYS, HEAD_BLOCK, MASKED)
    scores = _scores(q, tl.trans(k), inner, HAS_SOFTCAP)
    if MASKED:
        scores = tl.where(_visible(first, last, key_mask_ptr, start, keys, KEYS), scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * outer)
    weights = tl.exp2(scores * outer - new_max[:, None])
    correction = tl.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(weights, 1)
    v = _tile(v_ptr, start, v_sequence, v_last, keys, HEAD_DIM, KEYS, HEAD_BLOCK, MASKED)
    accumulator = tl.dot(weights.to(v.dtype), v, accumulator * correction[:, None], input_precision="ieee")
    return accumulator, new_max, row_sum


@triton.jit(do_not_specialize=["interval_batch", "queries", "keys"])
def _prepare_kernel(
    output_ptr, dy_ptr, log2_sum_ptr, sinks_ptr, first_ptr, last_ptr, delta_ptr, partial_ptr, intervals_ptr, bounds_ptr,
    dy_batch, dy_sequence, dy_head, dy_last, interval_batch, queries, keys,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Per query Σ dy·output and its interval, per block of queries its part of the sink's gradient and its bounds."""
    blocks, padded = tl.cdiv(queries, QUERIES), _padded(queries)
    block, head, batch = _query_block(blocks, HEADS)
    start, row = block * QUERIES, block * QUERIES + tl.arange(0, QUERIES)
    if delta_ptr is not None:
        output_ptr += (batch * queries * HEADS + head) * HEAD_DIM
        dy_ptr += batch * dy_batch + head * dy_head
        output = _tile(output_ptr, start, HEADS * HEAD_DIM, 1, queries, HEAD_DIM, QUERIES, HEAD_BLOCK, True)
        dy = _tile(dy_ptr, start, dy_sequence, dy_last, queries, HEAD_DIM, QUERIES, HEAD_BLOCK, True)
        delta = tl.sum(output.to(tl.float32) * dy.to(tl.float32), 1)
        rows = (batch * HEADS + head) * padded + row
        tl.store(delta_ptr + rows, delta, mask=row < padded)
        if partial_ptr is not None:
            log2_sum = tl.load(log2_sum_ptr + rows, mask=row < padded, other=float("inf"))
            weight = tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E - log2_sum)
            tl.store(partial_ptr + (batch * blocks + block) * HEADS + head, -tl.sum(weight * delta, 0))
    if bounds_ptr is not None:  # noqa: SIM102
        if head == 0:  # a condition of its own: the outer one is decided at compile time
            first, last = _interval(first_ptr + batch * interval_batch, last_ptr + batch * interval_batch, row, queries, keys)
            interval = intervals_ptr + batch * 2 * padded + row
            tl.store(interval, first, mask=row < padded)
            tl.store(interval + padded, last, mask=row < padded)
            bound = bounds_ptr + (batch * blocks + block) * _BOUNDS
            tl.store(bound, tl.min(first, 0))
            tl.store(bound + 1, tl.max(first, 0))
            tl.store(bound + 2, tl.min(last, 0))
            tl.store(bound + 3, tl.max(last, 0))


@triton.jit(do_not_specialize=["interval_batch", "queries", "keys"])
def _query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, key_mask_ptr, dy_ptr, log2_sum_ptr, delta_ptr, dq_ptr,
    q_batch, q_head, q_sequence, q_last, k_batch, k_head, k_sequence, k_last, v_batch, v_head, v_sequence, v_last,
    dy_batch, dy_sequence, dy_head, dy_last, interval_batch, queries, keys, inner, outer, scaling,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    block, head, batch = _query_block(tl.cdiv(queries, QUERIES), HEADS)
    q_ptr += batch * q_batch + head * q_head
    dy_ptr += batch * dy_batch + head * dy_head
    k_ptr += batch * k_batch + head // GROUP * k_head
    v_ptr += batch * v_batch + head // GROUP * v_head
    start, row = block * QUERIES, block * QUERIES + tl.arange(0, QUERIES)
    first, last = _interval(first_ptr + batch * interval_batch, last_ptr + batch * interval_batch, row, queries, keys)
    if key_mask_ptr is not None:
        key_mask_ptr += batch * keys
    masked, left, from_block, full_from, full = _key_blocks(first, last, row < queries, KEYS, key_mask_ptr is not None)

    q = _tile(q_ptr, start, q_sequence, q_last, queries, HEAD_DIM, QUERIES, HEAD_BLOCK, True)
    dy = _tile(dy_ptr, start, dy_sequence, dy_last, queries, HEAD_DIM, QUERIES, HEAD_BLOCK, True)
    padded = _padded(queries)
    rows = (batch * HEADS + head) * padded + row
    log2_sum = tl.load(log2_sum_ptr + rows, mask=row < padded, other=float("inf"))
    delta = tl.load(delta_ptr + rows, mask=row < padded, other=0.0)
    dq = tl.zeros((QUERIES, HEAD_BLOCK), tl.float32)
    for index in range(masked):
        key_block = tl.where(index < left, from_block + index, full_from + full + index - left)
        dq = _add_to_dq(
            dq, q, dy, log2_sum, delta, k_ptr, v_ptr, key_mask_ptr, key_block * KEYS, first, last,
            k_sequence, k_last, v_sequence, v_last, keys, inner, outer,
            HEAD_DIM, HAS_SOFTCAP, KEYS, HEAD_BLOCK, True,
        )  # fmt: skip
    for index in range(full):
        dq = _add_to_dq(
            dq, q, dy, log2_sum, delta, k_ptr, v_ptr, None, (full_from + index) * KEYS, first, last,
            k_sequence, k_last, v_sequence, v_last, keys, inner, outer,
            HEAD_DIM, HAS_SOFTCAP, KEYS, HEAD_BLOCK, False,
        )  # fmt: skip
    dq_ptr += (batch * queries * HEADS + head) * HEAD_DIM
    _store(dq_ptr, dq * scaling, start, HEADS * HEAD_DIM, queries, HEAD_DIM, QUERIES, HEAD_BLOCK)


@triton.jit
def _add_to_dq(
    dq, q, dy, log2_sum, delta, k_ptr, v_ptr, key_mask_ptr, start, first, last,
    k_sequence, k_last, v_sequence, v_last, keys, inner, outer,
    HEAD_DIM: tl.constexpr, HAS_SOFTCAP: tl.constexpr, KEYS: tl.constexpr, HEAD_BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k = _tile(k_ptr, start, k_sequence, k_last, keys, HEAD_DIM, KEYS, HEAD_BLOCK, MASKED)
    v = _tile(v_ptr, start, v_sequence, v_last, keys, HEAD_DIM, KEYS, HEAD_BLOCK, MASKED)
    scores = _scores(q, tl.trans(k), inner, HAS_SOFTCAP)
    weights = tl.exp2(scores * outer - log2_sum[:, None])
    if MASKED:
        weights = tl.where(_visible(first, last, key_mask_ptr, start, keys, KEYS), weights, 0.0)
    d_weights = tl.dot(dy, tl.trans(v), input_precision="ieee")
    d_scores = weights * (d_weights - delta[:, None])
    if HAS_SOFTCAP:
        d_scores *= 1.0 - scores * scores
    return tl.dot(d_scores.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["queries", "keys"])
def _key_value_gradient_kernel(
    q_ptr, k_ptr, v_ptr, intervals_ptr, bounds_ptr, key_mask_ptr, dy_ptr, log2_sum_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_batch, q_head, q_sequence, q_last, k_batch, k_head, k_sequence, k_last, v_batch, v_head, v_sequence, v_last,
    dy_batch, dy_sequence, dy_head, dy_last, queries, keys, inner, outer, scaling,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD_BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values from all queries of the group's heads; dk_ptr or dv_ptr may be None."""
    # The first keys, which causal attention sees most often, start first in all heads: the last programs are short.
    KEY_VALUE_HEADS: tl.constexpr = HEADS // GROUP
    program, programs = tl.program_id(0), tl.num_programs(0)
    sequences = programs // tl.cdiv(keys, KEYS)
    start = program // sequences * KEYS
    key_value_head = (program % sequences % KEY_VALUE_HEADS).to(tl.int64)
    batch = (program % sequences // KEY_VALUE_HEADS).to(tl.int64)
    q_ptr += batch * q_batch + key_value_head * GROUP * q_head
    dy_ptr += batch * dy_batch + key_value_head * GROUP * dy_head
    k_ptr += batch * k_batch + key_value_head * k_head
    v_ptr += batch * v_batch + key_value_head * v_head
    padded = _padded(queries)
    intervals_ptr += batch * 2 * padded
    log2_sum_ptr += (batch * HEADS + key_value_head * GROUP) * padded
    if delta_ptr is not None:
        delta_ptr += (batch * HEADS + key_value_head * GROUP) * padded
    if key_mask_ptr is not None:
        key_mask_ptr += batch * keys
    blocks = tl.cdiv(queries, QUERIES)
    masked, left, from_block, full_from, full = _query_blocks(
        bounds_ptr + batch * blocks * _BOUNDS, blocks, start, KEYS, SCAN, key_mask_ptr is not None
    )

    k = _tile(k_ptr, start, k_sequence, k_last, keys, HEAD_DIM, KEYS, HEAD_BLOCK, True)
    v = _tile(v_ptr, start, v_sequence, v_last, keys, HEAD_DIM, KEYS, HEAD_BLOCK, True)
    dk = tl.zeros((KEYS, HEAD_BLOCK), tl.float32)
    dv = tl.zeros((KEYS, HEAD_BLOCK), tl.float32)
    # One loop over heads and blocks: its loads stay in flight from one head to the next.
    for index in range(GROUP * masked):
        block = index % masked
        block = tl.where(block < left, from_block + block, full_from + full + block - left)
        dk, dv = _add_to_dk_dv(
            dk, dv, k, v, q_ptr, dy_ptr, log2_sum_ptr, delta_ptr, key_mask_ptr, intervals_ptr, index // masked,
            block * QUERIES, start, q_head, q_sequence, q_last, dy_head, dy_sequence, dy_last, queries, keys, inner, outer,
            HEAD_DIM, HAS_SOFTCAP, dk_ptr is not None, dv_ptr is not None, QUERIES, KEYS, HEAD_BLOCK, True,
        )  # fmt: skip
    for index in range(GROUP * full):
        dk, dv = _add_to_dk_dv(
            dk, dv, k, v, q_ptr, dy_ptr, log2_sum_ptr, delta_ptr, None, intervals_ptr, index // full,
            (full_from + index % full) * QUERIES, start, q_head, q_sequence, q_last, dy_head, dy_sequence, dy_last,
            queries, keys, inner, outer,
            HEAD_DIM, HAS_SOFTCAP, dk_ptr is not None, dv_ptr is not None, QUERIES, KEYS, HEAD_BLOCK, False,
        )  # fmt: skip

    target = (batch * keys * KEY_VALUE_HEADS + key_value_head) * HEAD_DIM
    if dk_ptr is not None:
        _store(dk_ptr + target, dk * scaling, start, KEY_VALUE_HEADS * HEAD_DIM, keys, HEAD_DIM, KEYS, HEAD_BLOCK)
    if dv_ptr is not None:
        _store(dv_ptr + target, dv, start, KEY_VALUE_HEADS * HEAD_DIM, keys, HEAD_DIM, KEYS, HEAD_BLOCK)


@triton.jit
def _add_to_dk_dv(
    dk, dv, k, v, q_ptr, dy_ptr, log2_sum_ptr, delta_ptr, key_mask_ptr, intervals_ptr, head, start, key_start,
    q_head, q_sequence, q_last, dy_head, dy_sequence, dy_last, queries, keys, inner, outer,
    HEAD_DIM: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WANTS_DK: tl.constexpr, WANTS_DV: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD_BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the queries from `start` on of a head of the group give. Scores are [keys, queries] here."""
    wide = tl.full((), 0, tl.int64) + head
    q = _tile(q_ptr + wide * q_head, start, q_sequence, q_last, queries, HEAD_DIM, QUERIES, HEAD_BLOCK, MASKED)
    dy = _tile(dy_ptr + wide * dy_head, start, dy_sequence, dy_last, queries, HEAD_DIM, QUERIES, HEAD_BLOCK, MASKED)
    row, padded = start + tl.arange(0, QUERIES), _padded(queries)
    log2_sum = _per_query(log2_sum_ptr + wide * padded, row, padded, float("inf"), MASKED)
    scores = _scores(k, tl.trans(q), inner, HAS_SOFTCAP)
    weights = tl.exp2(scores * outer - log2_sum[None, :])
    if MASKED:
        first = _per_query(intervals_ptr, row, padded, _LAST, True)
        last = _per_query(intervals_ptr + padded, row, padded, -1, True)
        key = key_start + tl.arange(0, KEYS)[:, None]
        visible = (first[None, :] <= key) & (key <= last[None, :])
        if key_mask_ptr is not None:
            visible &= tl.load(key_mask_ptr + key, mask=key < keys, other=0) != 0
        weights = tl.where(visible, weights, 0.0)
    if WANTS_DV:
        dv = tl.dot(weights.to(dy.dtype), dy, dv, input_precision="ieee")
    if WANTS_DK:
        delta = _per_query(delta_ptr + wide * padded, row, padded, 0.0, MASKED)
        d_weights = tl.dot(v, tl.trans(dy), input_precision="ieee")
        d_scores = weights * (d_weights - delta[None, :])
        if HAS_SOFTCAP:
            d_scores *= 1.0 - scores * scores
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _query_block(blocks, HEADS: tl.constexpr):
    """(block, head, batch) of this program. Blocks run backwards: the last queries, which see most keys, start first."""
    program = tl.program_id(0)
    block, sequence = blocks - 1 - program % blocks, program // blocks
    return block, (sequence % HEADS).to(tl.int64), (sequence // HEADS).to(tl.int64)  # 64-bit: offsets can pass 2**31


@triton.jit
def _padded(queries):
    return tl.cdiv(queries, _ALIGN) * _ALIGN


@triton.jit
def _per_query(ptr, row, padded, past_the_end, MASKED: tl.constexpr):
    """Numbers of a block of queries. A block that is seen entirely has no query past the end."""
    if MASKED:
        return tl.load(ptr + row, mask=row < padded, other=past_the_end)
    else:
        return tl.load(ptr + row)


@triton.jit
def _interval(first_ptr, last_ptr, row, queries, keys):
    """The intervals of rows, within the keys; empty, whatever the keys, for rows past the end."""
    first = tl.maximum(tl.load(first_ptr + row, mask=row < queries, other=_LAST), 0)
    last = tl.minimum(tl.load(last_ptr + row, mask=row < queries, other=-1), keys - 1)
    return first, last


@triton.jit
def _key_blocks(first, last, inside, KEYS: tl.constexpr, ALL_MASKED: tl.constexpr):
    """Which blocks of keys these rows see.

    Returns:
        how many need a mask, how many of these come before the full ones, the first of all, the first full one, how many
        are full.
    """
    from_block = tl.min(first, 0) // KEYS
    to_block = tl.maximum((tl.max(last, 0) + KEYS) // KEYS, from_block)
    full_from, full_to = to_block, to_block
    if not ALL_MASKED:  # rows past the end do not count: what they compute is not stored
        all_from = (tl.max(tl.where(inside, first, 0), 0) + (KEYS - 1)) // KEYS
        all_to = (tl.min(tl.where(inside, last, _LAST - 1), 0) + 1) // KEYS
        full_from = tl.where(all_from < all_to, all_from, to_block)
        full_to = tl.where(all_from < all_to, all_to, to_block)
    left = full_from - from_block
    return left + to_block - full_to, left, from_block, full_from, full_to - full_from


@triton.jit
def _query_blocks(bounds_ptr, blocks, start, KEYS: tl.constexpr, SCAN: tl.constexpr, ALL_MASKED: tl.constexpr):
    """Which blocks of queries see the keys from `start` on: as _key_blocks."""
    from_block, to_block, full_from, full_to, full = blocks, blocks * 0, blocks, blocks * 0, blocks * 0
    for scanned in range(0, blocks, SCAN):
        block = scanned + tl.arange(0, SCAN)
        bound, inside = bounds_ptr + block * _BOUNDS, block < blocks
        touched = tl.load(bound, mask=inside, other=_LAST) < start + KEYS
        touched &= tl.load(bound + 3, mask=inside, other=-1) >= start
        from_block = tl.minimum(from_block, tl.min(tl.where(touched, block, _LAST), 0))
        to_block = tl.maximum(to_block, tl.max(tl.where(touched, block + 1, 0), 0))
        if not ALL_MASKED:
            whole = tl.load(bound + 1, mask=inside, other=_LAST) <= start
            whole &= tl.load(bound + 2, mask=inside, other=-1) >= start + KEYS - 1
            full_from = tl.minimum(full_from, tl.min(tl.where(whole, block, _LAST), 0))
            full_to = tl.maximum(full_to, tl.max(tl.where(whole, block + 1, 0), 0))
            full += tl.sum(whole.to(tl.int32), 0)
    to_block = tl.maximum(to_block, from_block)
    adjacent = (full > 0) & (full_to - full_from == full)  # else, in rows that are not monotonic, all are masked
    full_from, full_to = tl.where(adjacent, full_from, to_block), tl.where(adjacent, full_to, to_block)
    left = full_from - from_block
    return left + to_block - full_to, left, from_block, full_from, full_to - full_from


@triton.jit
def _visible(first, last, key_mask_ptr, start, keys, KEYS: tl.constexpr):
    key = start + tl.arange(0, KEYS)
    visible = (first[:, None] <= key[None, :]) & (key[None, :] <= last[:, None])
    if key_mask_ptr is not None:
        visible &= (tl.load(key_mask_ptr + key, mask=key < keys, other=0) != 0)[None, :]
    return visible


@triton.jit
def _scores(left, right, inner, HAS_SOFTCAP: tl.constexpr):
    """q·k, or tanh(scaling·q·k / softcap) where `inner` is 2·log2(e)·scaling / softcap; times `outer` the score in base 2."""
    scores = tl.dot(left, right, input_precision="ieee")
    if HAS_SOFTCAP:
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * inner))
    return scores


@triton.jit
def _tile(
    ptr, start, sequence, last, count, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """[ROWS, HEAD_BLOCK] of a head from row `start` on; zeros past the end (MASKED: where there may be one)."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, HEAD_BLOCK)[None, :]
    pointers = ptr + start.to(tl.int64) * sequence + (row * sequence + column * last)
    if MASKED and HEAD_DIM < HEAD_BLOCK:
        return tl.load(pointers, mask=(row < count - start) & (column < HEAD_DIM), other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=row < count - start, other=0.0)
    elif HEAD_DIM < HEAD_BLOCK:
        return tl.load(pointers, mask=column < HEAD_DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store(
    ptr, values, start, sequence, count, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr
):  # fmt: skip
    """Store a head's rows from `start` on in the dtype of the target, whose last stride is 1."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, HEAD_BLOCK)[None, :]
    pointers = ptr + start.to(tl.int64) * sequence + (row * sequence + column)
    tl.store(pointers, values.to(ptr.dtype.element_ty), mask=(row < count - start) & (column < HEAD_DIM))


class Tile(NamedTuple):
    """What a program works on at a time, and how: rows of queries and keys, warps, blocks of loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


def tile(kernel: str, head_block: int, element_size: int, shared: int) -> Tile:
    """The block sizes of a kernel, "forward", "query_gradient" or "key_value_gradient".

    The table holds what suits a multiprocessor with 227 KiB of shared memory; for one with less, fewer loads are in flight
    and then blocks are halved, until they fit.

    Args:
        head_block: head_dim, rounded up to a power of two.
        element_size: bytes of an element of q.
        shared: bytes of shared memory per multiprocessor.
    """
    if element_size == 4:  # products in fp32 go through ordinary registers
        return Tile(32, 32, 4, 1)
    chosen = TILES[kernel][max(64, head_block)]
    while _shared_bytes(kernel, chosen, head_block, element_size) > shared - 1024 and chosen != (16, 16, chosen.warps, 1):
        chosen = _smaller(kernel, chosen)
    return chosen


TILES = {
    "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 64, 8, 2)},
    "query_gradient": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 2), 256: Tile(128, 32, 8, 2)},
    "key_value_gradient": {64: Tile(64, 128, 8, 3), 128: Tile(64, 128, 8, 2), 256: Tile(32, 128, 8, 2)},
}


def _shared_bytes(kernel: str, chosen: Tile, head_block: int, element_size: int) -> int:
    """Tiles that stay, tiles in flight, and a tile of scores that changes its layout."""
    streamed, kept = (chosen.queries, 2 * chosen.keys) if kernel == "key_value_gradient" else (chosen.keys, 2 * chosen.queries)
    if kernel == "forward":
        kept = chosen.queries
    return ((kept + 2 * chosen.stages * streamed) * head_block + chosen.queries * chosen.keys) * element_size


def _smaller(kernel: str, chosen: Tile) -> Tile:
    if chosen.stages > 1:
        return chosen._replace(stages=chosen.stages - 1)
    streamed, kept = ("queries", "keys") if kernel == "key_value_gradient" else ("keys", "queries")
    halved = streamed if getattr(chosen, streamed) > max(16, getattr(chosen, kept) // 2) else kept
    return chosen._replace(**{halved: max(16, getattr(chosen, halved) // 2)})


def refuses(q, k, v, first_key, last_key, key_mask, sinks, scaling, softcap):
    if q.dtype == torch.float64 or (sinks is not None and sinks.dtype == torch.float64):
        return "float64 input: the kernel computes in float32"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim {q.shape[-1]} above {MAX_HEAD_DIM}: a block of queries must fit one program's registers"
    return misfit(q, k, v, first_key, last_key, key_mask, sinks, scaling, softcap)


def forward(needs, q, k, v, first_key, last_key, key_mask, sinks, scaling, softcap):
    batch, heads, queries, head_dim = q.shape
    output = torch.empty(batch, queries, heads, head_dim, dtype=q.dtype, device=q.device)
    log2_sum = _numbers(batch, heads, queries, like=q) if any(needs) else None
    q, k, v = _addressable(q), _addressable(k), _addressable(v)
    first_key, last_key, key_mask, sinks = _dense(first_key, last_key, key_mask, sinks)
    sizes, head_block = _sizes(q, k, softcap), _head_block(head_dim)
    chosen = tile("forward", head_block, q.element_size(), hardware.shared_memory(q.device))
    if not is_traced(q) and queries <= FEW_QUERIES:
        chosen = chosen._replace(queries=FEW_QUERIES, warps=4)
    launch(
        _forward_kernel, (triton.cdiv(queries, chosen.queries) * heads * batch,),
        q, k, v, first_key, last_key, key_mask, sinks, output, log2_sum, *q.stride(), *k.stride(), *v.stride(),
        _batch_stride(first_key), queries, k.shape[2], *_factors(scaling, softcap),
        **sizes, QUERIES=chosen.queries, KEYS=chosen.keys, num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return output, (log2_sum,)


def backward(needs, gradients, *, q, k, v, first_key, last_key, key_mask, sinks, scaling, softcap, output, log2_sum):
    dy = gradients[0]
    if dy is None:
        return None, None, None, None
    q, k, v, dy = _addressable(q), _addressable(k), _addressable(v), _addressable(dy.transpose(1, 2))
    dy = (dy if dy.stride(3) == 1 else dy.contiguous()).transpose(1, 2)
    first_key, last_key, key_mask, sinks = _dense(first_key, last_key, key_mask, sinks)
    shared, head_block = hardware.shared_memory(q.device), _head_block(q.shape[3])
    chosen = tile("key_value_gradient", head_block, q.element_size(), shared)
    delta, intervals, bounds, dsinks = _prepare(needs, q, k, first_key, last_key, dy, sinks, output, log2_sum, chosen.queries)
    dq, dk, dv = (token_major(x.shape, x) if needed else None for x, needed in zip((q, k, v), needs))
    strides = (*q.stride(), *k.stride(), *v.stride(), *dy.stride())
    numbers = (q.shape[2], k.shape[2], *_factors(scaling, softcap), scaling)
    for targets in _together(dk, dv, head_block):
        launch(
            _key_value_gradient_kernel, (triton.cdiv(k.shape[2], chosen.keys) * k.shape[1] * k.shape[0],),
            q, k, v, intervals, bounds, key_mask, dy, log2_sum, delta, *targets, *strides, *numbers,
            **_sizes(q, k, softcap), SCAN=256, QUERIES=chosen.queries, KEYS=chosen.keys, num_warps=chosen.warps,
            num_stages=chosen.stages,
        )  # fmt: skip
    if dq is not None:
        chosen = tile("query_gradient", head_block, q.element_size(), shared)
        launch(
            _query_gradient_kernel, (triton.cdiv(q.shape[2], chosen.queries) * q.shape[1] * q.shape[0],),
            q, k, v, first_key, last_key, key_mask, dy, log2_sum, delta, dq, *strides, _batch_stride(first_key), *numbers,
            **_sizes(q, k, softcap),
            QUERIES=chosen.queries, KEYS=chosen.keys, num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return dq, dk, dv, dsinks


def _together(dk, dv, head_block: int) -> list:
    """The launches that make dk and dv, each with its targets: one for both unless their sums exceed the registers."""
    if dk is not None and dv is not None and head_block <= MAX_HEAD_TOGETHER:
        return [(dk, dv)]
    return [targets for targets in ((None, dv), (dk, None)) if any(t is not None for t in targets)]


def _prepare(needs, q, k, first_key, last_key, dy, sinks, output, log2_sum, block):
    """What the other kernels read, None what they do not.

    Returns:
        Σ dy·output per query, its interval, the bounds of the intervals per `block` queries, the gradient of the sinks.
    """
    (batch, heads, queries, head_dim), blocks = q.shape, triton.cdiv(q.shape[2], block)
    delta, intervals, bounds, partial = None, None, None, None
    if needs.q or needs.k or needs.sinks:
        delta = _numbers(batch, heads, queries, like=q)
    if needs.k or needs.v:
        intervals = _numbers(batch, 2, queries, like=q, dtype=torch.int32)
        bounds = torch.empty(batch, blocks, _BOUNDS.value, dtype=torch.int32, device=q.device)
    if needs.sinks:
        partial = torch.empty(batch, blocks, heads, dtype=torch.float32, device=q.device)
    head_block = _head_block(head_dim)
    launch(
        _prepare_kernel, (blocks * heads * batch,),
        output, dy, log2_sum, sinks, first_key, last_key, delta, partial, intervals, bounds, *dy.stride(),
        _batch_stride(first_key), queries, k.shape[2], HEADS=heads, HEAD_DIM=head_dim, QUERIES=block, HEAD_BLOCK=head_block,
        num_warps=min(max(block * head_block // 2048, 1), 8),
    )  # fmt: skip
    return delta, intervals, bounds, None if partial is None else partial.sum((0, 1)).to(sinks.dtype)


def _numbers(*shape, like, dtype=torch.float32):
    """An empty tensor of a number per query, the last dimension rounded up: see _ALIGN."""
    *outer, queries = shape
    padded = triton.cdiv(queries, _ALIGN.value) * _ALIGN.value
    return torch.empty(*outer, padded, dtype=dtype, device=like.device)


def _dense(first_key, last_key, key_mask, sinks):
    """The small tensors as the kernels read them: without gaps, and a mask as bytes."""
    key_mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    return first_key.contiguous(), last_key.contiguous(), key_mask, None if sinks is None else sinks.contiguous()


def _addressable(tensor):
    """The tensor, or a copy if offsets within a block could pass 2**31: programs add 64-bit numbers for its start only."""
    if is_traced(tensor) or 512 * max(tensor.stride(2), tensor.stride(3)) < 2**31:
        return tensor
    return tensor.contiguous()


def _batch_stride(interval):
    return interval.shape[1] if interval.shape[0] > 1 else 0


def _head_block(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))  # the least that a matrix product takes


def _sizes(q, k, softcap) -> dict:
    return {
        "HEADS": q.shape[1], "GROUP": q.shape[1] // k.shape[1], "HEAD_DIM": q.shape[3], "HAS_SOFTCAP": softcap is not None,
        "HEAD_BLOCK": _head_block(q.shape[3]),
    }  # fmt: skip


def _factors(scaling: float, softcap: float | None) -> tuple[float, float]:
    """Inside and outside of the soft cap's tanh: see _scores."""
    if softcap is None:
        return 1.0, scaling * _LOG2E.value
    return 2.0 * _LOG2E.value * scaling / softcap, softcap * _LOG2E.value
