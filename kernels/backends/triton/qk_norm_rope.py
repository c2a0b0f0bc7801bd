"""RMS norm and rotary position embedding of a packed projection in Triton, from and to the packed layout.

Forwards a program serves a tile of one token's query, key or value heads. Backwards a few programs per multiprocessor walk over
the tokens, and each keeps partial gradients of both weights in registers. A head is held as the two halves that its rotation
pairs and the rest that is not rotated.
"""

import torch
import triton
import triton.language as tl

from liger_models.kernels.backends.triton.launch import launch, multiprocessors, next_power_of_2
from liger_models.kernels.backends.triton.rope import angle_strides, heads_per_tile, token_major, unsupported
from liger_models.kernels.qk_norm_rope import misfit


# The sequence length is not specialised: one compiled kernel serves all lengths.
@triton.jit(do_not_specialize=["sequence"])
def _forward_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
    qkv_batch, qkv_sequence, qkv_last, cos_batch, cos_sequence, sin_batch, sin_sequence, sequence, eps, offset,
    HEADS: tl.constexpr, KEY_VALUE_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    SCALE_IN_FP32: tl.constexpr, INTERLEAVED: tl.constexpr, Q_TILE: tl.constexpr, KEY_VALUE_TILE: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # 64-bit: token offsets can pass 2**31
    tile = tl.program_id(1)
    batch, position = token // sequence, token % sequence
    qkv_ptr += batch * qkv_batch + position * qkv_sequence
    cos_ptr += batch * cos_batch + position * cos_sequence
    sin_ptr += batch * sin_batch + position * sin_sequence
    K_START: tl.constexpr = (HEADS + Q_TILE - 1) // Q_TILE
    V_START: tl.constexpr = K_START + (KEY_VALUE_HEADS + KEY_VALUE_TILE - 1) // KEY_VALUE_TILE
    if tile < K_START:
        _norm_and_rotate(
            qkv_ptr, q_ptr + token * HEADS * HEAD_DIM, q_weight_ptr, cos_ptr, sin_ptr, tile * Q_TILE, qkv_last, eps, offset,
            HEADS, HEAD_DIM, ROTARY_DIM, SCALE_IN_FP32, INTERLEAVED, Q_TILE, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    elif tile < V_START:
        _norm_and_rotate(
            qkv_ptr + HEADS * HEAD_DIM * qkv_last, k_ptr + token * KEY_VALUE_HEADS * HEAD_DIM, k_weight_ptr, cos_ptr, sin_ptr,
            (tile - K_START) * KEY_VALUE_TILE, qkv_last, eps, offset,
            KEY_VALUE_HEADS, HEAD_DIM, ROTARY_DIM, SCALE_IN_FP32, INTERLEAVED, KEY_VALUE_TILE, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        head = (tile - V_START) * KEY_VALUE_TILE + tl.arange(0, KEY_VALUE_TILE)[:, None]
        column = tl.arange(0, HEAD_BLOCK)[None, :]
        mask = (head < KEY_VALUE_HEADS) & (column < HEAD_DIM)
        place = head * HEAD_DIM + column
        v = tl.load(qkv_ptr + ((HEADS + KEY_VALUE_HEADS) * HEAD_DIM + place) * qkv_last, mask=mask)
        tl.store(v_ptr + token * KEY_VALUE_HEADS * HEAD_DIM + place, v, mask=mask)


@triton.jit
def _norm_and_rotate(
    source_ptr, target_ptr, weight_ptr, cos_ptr, sin_ptr, first, last, eps, offset,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, SCALE_IN_FP32: tl.constexpr,
    INTERLEAVED: tl.constexpr, TILE: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """TILE heads of a token, from head `first` on."""
    head = first + tl.arange(0, TILE)[:, None]
    inside = head < HEADS
    a, b = _load_pairs(source_ptr + head * HEAD_DIM * last, last, inside, ROTARY_DIM, INTERLEAVED, TILE, HALF_BLOCK)
    squares = tl.sum(a * a + b * b, axis=1)
    if HEAD_DIM > ROTARY_DIM:
        column = ROTARY_DIM + tl.arange(0, REST_BLOCK)[None, :]
        mask = inside & (column < HEAD_DIM)
        rest = tl.load(source_ptr + (head * HEAD_DIM + column) * last, mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    rstd = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    a_weight, b_weight = _pair_weights(weight_ptr, offset, ROTARY_DIM, SCALE_IN_FP32, INTERLEAVED, HALF_BLOCK)
    a = _scaled(a * rstd, a_weight, source_ptr, target_ptr, SCALE_IN_FP32)
    b = _scaled(b * rstd, b_weight, source_ptr, target_ptr, SCALE_IN_FP32)
    cos, sin = _angles(cos_ptr, sin_ptr, ROTARY_DIM, HALF_BLOCK)
    target_ptr += head * HEAD_DIM
    _store_pairs(
        target_ptr, a * cos - b * sin, b * cos + a * sin, 1, inside, ROTARY_DIM, INTERLEAVED, TILE, HALF_BLOCK
    )  # fmt: skip
    if HEAD_DIM > ROTARY_DIM:
        weight = _rest_weight(weight_ptr, offset, HEAD_DIM, ROTARY_DIM, SCALE_IN_FP32, REST_BLOCK)
        rest = _scaled(rest * rstd, weight, source_ptr, target_ptr, SCALE_IN_FP32)
        tl.store(target_ptr + column, rest.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["sequence", "tokens"])
def _backward_kernel(
    qkv_ptr, dq_ptr, dk_ptr, dv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dqkv_ptr, dq_weight_ptr, dk_weight_ptr,
    dq_batch, dq_head, dq_sequence, dq_last, dk_batch, dk_head, dk_sequence, dk_last, dv_batch, dv_head, dv_sequence, dv_last,
    qkv_batch, qkv_sequence, qkv_last, cos_batch, cos_sequence, sin_batch, sin_sequence, sequence, tokens, eps, offset,
    HEADS: tl.constexpr, KEY_VALUE_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    SCALE_IN_FP32: tl.constexpr, INTERLEAVED: tl.constexpr, Q_TILE: tl.constexpr, KEY_VALUE_TILE: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)  # 64-bit: token offsets can pass 2**31
    q_a, q_b = tl.zeros((Q_TILE, HALF_BLOCK), tl.float32), tl.zeros((Q_TILE, HALF_BLOCK), tl.float32)
    k_a, k_b = tl.zeros((KEY_VALUE_TILE, HALF_BLOCK), tl.float32), tl.zeros((KEY_VALUE_TILE, HALF_BLOCK), tl.float32)
    q_rest, k_rest = tl.zeros((Q_TILE, REST_BLOCK), tl.float32), tl.zeros((KEY_VALUE_TILE, REST_BLOCK), tl.float32)
    WIDTH: tl.constexpr = (HEADS + 2 * KEY_VALUE_HEADS) * HEAD_DIM
    for token in range(program, tokens, programs):
        batch, position = token // sequence, token % sequence
        source_ptr = qkv_ptr + batch * qkv_batch + position * qkv_sequence
        token_cos_ptr = cos_ptr + batch * cos_batch + position * cos_sequence
        token_sin_ptr = sin_ptr + batch * sin_batch + position * sin_sequence
        for tile in tl.static_range((HEADS + Q_TILE - 1) // Q_TILE):
            gradient_ptr = None if dq_ptr is None else dq_ptr + batch * dq_batch + position * dq_sequence
            target_ptr = None if dqkv_ptr is None else dqkv_ptr + token * WIDTH
            q_a, q_b, q_rest = _head_gradients(
                q_a, q_b, q_rest, gradient_ptr, source_ptr, target_ptr, q_weight_ptr, token_cos_ptr, token_sin_ptr,
                tile * Q_TILE, dq_head, dq_last, qkv_last, eps, offset,
                HEADS, HEAD_DIM, ROTARY_DIM, SCALE_IN_FP32, INTERLEAVED, Q_TILE, HALF_BLOCK, REST_BLOCK,
            )  # fmt: skip
        for tile in tl.static_range((KEY_VALUE_HEADS + KEY_VALUE_TILE - 1) // KEY_VALUE_TILE):
            gradient_ptr = None if dk_ptr is None else dk_ptr + batch * dk_batch + position * dk_sequence
            target_ptr = None if dqkv_ptr is None else dqkv_ptr + token * WIDTH + HEADS * HEAD_DIM
            k_a, k_b, k_rest = _head_gradients(
                k_a, k_b, k_rest, gradient_ptr, source_ptr + HEADS * HEAD_DIM * qkv_last, target_ptr, k_weight_ptr,
                token_cos_ptr, token_sin_ptr, tile * KEY_VALUE_TILE, dk_head, dk_last, qkv_last, eps, offset,
                KEY_VALUE_HEADS, HEAD_DIM, ROTARY_DIM, SCALE_IN_FP32, INTERLEAVED, KEY_VALUE_TILE, HALF_BLOCK, REST_BLOCK,
            )  # fmt: skip
            if dqkv_ptr is not None:
                head = tile * KEY_VALUE_TILE + tl.arange(0, KEY_VALUE_TILE)[:, None]
                column = tl.arange(0, HEAD_BLOCK)[None, :]
                mask = (head < KEY_VALUE_HEADS) & (column < HEAD_DIM)
                place = dqkv_ptr + token * WIDTH + (HEADS + KEY_VALUE_HEADS + head) * HEAD_DIM + column
                if dv_ptr is None:
                    tl.store(place, tl.zeros((KEY_VALUE_TILE, HEAD_BLOCK), dqkv_ptr.dtype.element_ty), mask=mask)
                else:
                    dv = dv_ptr + batch * dv_batch + position * dv_sequence + head.to(tl.int64) * dv_head + column * dv_last
                    tl.store(place, tl.load(dv, mask=mask), mask=mask)
    if dq_weight_ptr is not None:
        _store_weight_gradient(
            dq_weight_ptr + program * HEAD_DIM, q_a, q_b, q_rest, HEAD_DIM, ROTARY_DIM, INTERLEAVED, HALF_BLOCK, REST_BLOCK
        )  # fmt: skip
    if dk_weight_ptr is not None:
        _store_weight_gradient(
            dk_weight_ptr + program * HEAD_DIM, k_a, k_b, k_rest, HEAD_DIM, ROTARY_DIM, INTERLEAVED, HALF_BLOCK, REST_BLOCK
        )  # fmt: skip


@triton.jit
def _head_gradients(
    total_a, total_b, total_rest, gradient_ptr, source_ptr, target_ptr, weight_ptr, cos_ptr, sin_ptr,
    first, gradient_head, gradient_last, source_last, eps, offset,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, SCALE_IN_FP32: tl.constexpr,
    INTERLEAVED: tl.constexpr, TILE: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the gradient of TILE heads of a token, and add to the totals that of the weight, a row for each head of the tile.

    Without a gradient (None) it stores zeros.
    """
    head = first + tl.arange(0, TILE)[:, None]
    inside = head < HEADS
    column = ROTARY_DIM + tl.arange(0, REST_BLOCK)[None, :]
    rest_mask = inside & (column < HEAD_DIM)
    if gradient_ptr is None:
        if target_ptr is not None:
            zero = tl.zeros((TILE, HALF_BLOCK), tl.float32)
            _store_pairs(target_ptr + head * HEAD_DIM, zero, zero, 1, inside, ROTARY_DIM, INTERLEAVED, TILE, HALF_BLOCK)
            if HEAD_DIM > ROTARY_DIM:
                zero = tl.zeros((TILE, REST_BLOCK), target_ptr.dtype.element_ty)
                tl.store(target_ptr + head * HEAD_DIM + column, zero, mask=rest_mask)
    else:
        source = source_ptr + head * HEAD_DIM * source_last
        gradient = gradient_ptr + head.to(tl.int64) * gradient_head
        a, b = _load_pairs(source, source_last, inside, ROTARY_DIM, INTERLEAVED, TILE, HALF_BLOCK)
        da, db = _load_pairs(gradient, gradient_last, inside, ROTARY_DIM, INTERLEAVED, TILE, HALF_BLOCK)
        squares = tl.sum(a * a + b * b, axis=1)
        if HEAD_DIM > ROTARY_DIM:
            rest = tl.load(source + column * source_last, mask=rest_mask, other=0.0).to(tl.float32)
            d_rest = tl.load(gradient + column * gradient_last, mask=rest_mask, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1)
        rstd = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        cos, sin = _angles(cos_ptr, sin_ptr, ROTARY_DIM, HALF_BLOCK)
        da, db = da * cos + db * sin, db * cos - da * sin
        a, b = a * rstd, b * rstd
        total_a += da * _normalised(a, source_ptr, SCALE_IN_FP32)
        total_b += db * _normalised(b, source_ptr, SCALE_IN_FP32)
        if HEAD_DIM > ROTARY_DIM:
            rest *= rstd
            total_rest += d_rest * _normalised(rest, source_ptr, SCALE_IN_FP32)
        if target_ptr is not None:
            a_weight, b_weight = _pair_weights(weight_ptr, offset, ROTARY_DIM, SCALE_IN_FP32, INTERLEAVED, HALF_BLOCK)
            da, db = da * a_weight, db * b_weight
            along = tl.sum(da * a + db * b, axis=1)
            if HEAD_DIM > ROTARY_DIM:
                d_rest *= _rest_weight(weight_ptr, offset, HEAD_DIM, ROTARY_DIM, SCALE_IN_FP32, REST_BLOCK)
                along += tl.sum(d_rest * rest, axis=1)
            along = (along / HEAD_DIM)[:, None]
            _store_pairs(
                target_ptr + head * HEAD_DIM, rstd * (da - a * along), rstd * (db - b * along), 1, inside,
                ROTARY_DIM, INTERLEAVED, TILE, HALF_BLOCK,
            )  # fmt: skip
            if HEAD_DIM > ROTARY_DIM:
                d_rest = rstd * (d_rest - rest * along)
                tl.store(target_ptr + head * HEAD_DIM + column, d_rest.to(target_ptr.dtype.element_ty), mask=rest_mask)
    return total_a, total_b, total_rest


@triton.jit
def _store_weight_gradient(
    ptr, total_a, total_b, total_rest,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    a, b = tl.sum(total_a, axis=0)[None, :], tl.sum(total_b, axis=0)[None, :]
    row = tl.zeros((1, 1), tl.int32)
    _store_pairs(ptr + row, a, b, 1, row == 0, ROTARY_DIM, INTERLEAVED, 1, HALF_BLOCK)
    if HEAD_DIM > ROTARY_DIM:
        column = ROTARY_DIM + tl.arange(0, REST_BLOCK)
        tl.store(ptr + column, tl.sum(total_rest, axis=0), mask=column < HEAD_DIM)


@triton.jit
def _load_pairs(
    ptr, last, inside, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF_BLOCK: tl.constexpr
):  # fmt: skip
    """Both members of the pairs of ROWS heads, [ROWS, HALF_BLOCK] each in fp32; `ptr` and `inside` are [ROWS, 1]."""
    if INTERLEAVED:  # neighbours are loaded together and parted in registers: whole cache lines
        column = tl.arange(0, 2 * HALF_BLOCK)[None, :]
        both = tl.load(ptr + column * last, mask=inside & (column < ROTARY_DIM), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (ROWS, HALF_BLOCK, 2)))
    else:
        HALF: tl.constexpr = ROTARY_DIM // 2
        pair = tl.arange(0, HALF_BLOCK)[None, :]
        a = tl.load(ptr + pair * last, mask=inside & (pair < HALF), other=0.0).to(tl.float32)
        b = tl.load(ptr + (HALF + pair) * last, mask=inside & (pair < HALF), other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(
    ptr, a, b, last, inside,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF_BLOCK)[None, :]
        both = tl.reshape(tl.join(a, b), (ROWS, 2 * HALF_BLOCK)).to(ptr.dtype.element_ty)
        tl.store(ptr + column * last, both, mask=inside & (column < ROTARY_DIM))
    else:
        HALF: tl.constexpr = ROTARY_DIM // 2
        pair = tl.arange(0, HALF_BLOCK)[None, :]
        tl.store(ptr + pair * last, a.to(ptr.dtype.element_ty), mask=inside & (pair < HALF))
        tl.store(ptr + (HALF + pair) * last, b.to(ptr.dtype.element_ty), mask=inside & (pair < HALF))


@triton.jit
def _angles(cos_ptr, sin_ptr, ROTARY_DIM: tl.constexpr, HALF_BLOCK: tl.constexpr):
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    mask = pair < ROTARY_DIM // 2
    cos = tl.load(cos_ptr + pair, mask=mask, other=0.0).to(tl.float32)
    return cos, tl.load(sin_ptr + pair, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _pair_weights(
    ptr, offset, ROTARY_DIM: tl.constexpr, SCALE_IN_FP32: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_BLOCK: tl.constexpr
):  # fmt: skip
    """offset + weight for both members of the pairs, [1, HALF_BLOCK] each in fp32, rounded as rms_norm does."""
    row = tl.zeros((1, 1), tl.int32)
    a, b = _load_pairs(ptr + row, 1, row == 0, ROTARY_DIM, INTERLEAVED, 1, HALF_BLOCK)
    a, b = a + offset, b + offset
    if not SCALE_IN_FP32:
        a, b = a.to(ptr.dtype.element_ty).to(tl.float32), b.to(ptr.dtype.element_ty).to(tl.float32)
    return a, b


@triton.jit
def _rest_weight(
    ptr, offset, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, SCALE_IN_FP32: tl.constexpr, REST_BLOCK: tl.constexpr
):  # fmt: skip
    column = ROTARY_DIM + tl.arange(0, REST_BLOCK)[None, :]
    weight = tl.load(ptr + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32) + offset
    if not SCALE_IN_FP32:
        weight = weight.to(ptr.dtype.element_ty).to(tl.float32)
    return weight


@triton.jit
def _normalised(value, source_ptr, SCALE_IN_FP32: tl.constexpr):
    """The factor that meets the weight: rounded to the input's dtype first, unless the product is formed in fp32."""
    if SCALE_IN_FP32:
        return value
    else:
        return value.to(source_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _scaled(value, weight, source_ptr, target_ptr, SCALE_IN_FP32: tl.constexpr):
    """The norm's result, rounded to its dtype, in fp32."""
    scaled = _normalised(value, source_ptr, SCALE_IN_FP32) * weight
    return scaled.to(target_ptr.dtype.element_ty).to(tl.float32)


def refuses(
    qkv, q_weight, k_weight, cos, sin, num_heads, num_key_value_heads, eps, offset, scale_in_fp32, interleaved
):  # fmt: skip
    reason = misfit(qkv, q_weight, k_weight, cos, sin, num_heads, num_key_value_heads)
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_key_value_heads)
    return reason or unsupported(head_dim, qkv, q_weight, cos, sin)


def forward(
    needs, qkv, q_weight, k_weight, cos, sin, num_heads, num_key_value_heads, eps, offset, scale_in_fp32, interleaved
):  # fmt: skip
    batch, sequence, width = qkv.shape
    shapes = _shapes(width, cos, num_heads, num_key_value_heads)
    head_dim = shapes["HEAD_DIM"]
    normed = qkv.dtype if scale_in_fp32 else torch.promote_types(qkv.dtype, q_weight.dtype)
    q, k, v = (
        token_major((batch, count, sequence, head_dim), qkv, dtype)
        for count, dtype in ((num_heads, normed), (num_key_value_heads, normed), (num_key_value_heads, qkv.dtype))
    )
    cos, sin = (angle if angle.stride(-1) == 1 else angle.contiguous() for angle in (cos, sin))
    key_value_tiles = triton.cdiv(num_key_value_heads, shapes["KEY_VALUE_TILE"])
    launch(
        _forward_kernel, (batch * sequence, triton.cdiv(num_heads, shapes["Q_TILE"]) + 2 * key_value_tiles),
        qkv, q_weight.contiguous(), k_weight.contiguous(), cos, sin, q, k, v,
        *qkv.stride(), *angle_strides(cos), *angle_strides(sin), sequence, eps, offset,
        **shapes, SCALE_IN_FP32=scale_in_fp32, INTERLEAVED=interleaved, num_warps=4,
    )  # fmt: skip
    return (q, k, v), ()


def backward(
    needs, gradients, *, qkv, q_weight, k_weight, cos, sin, num_heads, num_key_value_heads, eps, offset, scale_in_fp32,
    interleaved,
):  # fmt: skip
    dq, dk, dv = gradients
    batch, sequence, width = qkv.shape
    shapes = _shapes(width, cos, num_heads, num_key_value_heads)
    programs = max(1, min(batch * sequence, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(qkv.device)))
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device) if needs.qkv else None
    partial_q, partial_k = (
        torch.empty(programs, shapes["HEAD_DIM"], dtype=torch.float32, device=qkv.device) if needed else None
        for needed in (needs.q_weight, needs.k_weight)
    )
    cos, sin = (angle if angle.stride(-1) == 1 else angle.contiguous() for angle in (cos, sin))
    launch(
        _backward_kernel, (programs,),
        qkv, dq, dk, dv, q_weight.contiguous(), k_weight.contiguous(), cos, sin, dqkv, partial_q, partial_k,
        *(stride for gradient in gradients for stride in ((0, 0, 0, 0) if gradient is None else gradient.stride())),
        *qkv.stride(), *angle_strides(cos), *angle_strides(sin), sequence, batch * sequence, eps, offset,
        **shapes, SCALE_IN_FP32=scale_in_fp32, INTERLEAVED=interleaved, num_warps=8,
    )  # fmt: skip
    dq_weight, dk_weight = (
        None if partial is None else partial.sum(0).to(weight.dtype)
        for partial, weight in ((partial_q, q_weight), (partial_k, k_weight))
    )
    return dqkv, dq_weight, dk_weight


# With 8 warps and about 100 registers a thread two programs fit a multiprocessor.
PROGRAMS_PER_MULTIPROCESSOR = 2


def _shapes(width, cos, num_heads, num_key_value_heads):
    """The sizes that both kernels are compiled for."""
    head_dim, rotary_dim = width // (num_heads + 2 * num_key_value_heads), cos.shape[-1]
    return {
        "HEADS": num_heads,
        "KEY_VALUE_HEADS": num_key_value_heads,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "Q_TILE": heads_per_tile(num_heads, head_dim),
        "KEY_VALUE_TILE": heads_per_tile(num_key_value_heads, head_dim),
        "HALF_BLOCK": next_power_of_2(max(rotary_dim // 2, 1)),
        "REST_BLOCK": next_power_of_2(max(head_dim - rotary_dim, 1)),
        "HEAD_BLOCK": next_power_of_2(head_dim),
    }
