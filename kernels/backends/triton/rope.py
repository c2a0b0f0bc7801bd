"""Rotary position embedding in Triton. A program serves a tile of one token's query, key or value heads.

One kernel moves heads from tensors of any strides to tensors in which a token's heads are contiguous. It serves rope both ways
and qkv_rope both ways: the gradient of a rotation is the rotation by the negative angle.
"""

import torch
import triton
import triton.language as tl

from liger_models.kernels.backends.triton.launch import launch, next_power_of_2
from liger_models.kernels.rope import misfit

MAX_HEAD_DIM = 1024


# The sequence length is not specialised: one compiled kernel serves all lengths.
@triton.jit(do_not_specialize=["sequence"])
def _rope_kernel(
    cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, q_target_ptr, k_target_ptr, v_target_ptr,
    cos_batch, cos_sequence, sin_batch, sin_sequence,
    q_batch, q_head, q_sequence, q_last, k_batch, k_head, k_sequence, k_last, v_batch, v_head, v_sequence, v_last, sequence,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr,
    V_ROW: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr, V_TILE: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # 64-bit: token offsets can pass 2**31
    tile = tl.program_id(1)
    batch, position = token // sequence, token % sequence
    cos_ptr += batch * cos_batch + position * cos_sequence
    sin_ptr += batch * sin_batch + position * sin_sequence
    # Nested conditions: the outer one is decided at compile time and drops a part that has no pointers.
    K_START: tl.constexpr = (Q_HEADS + Q_TILE - 1) // Q_TILE
    V_START: tl.constexpr = K_START + (K_HEADS + K_TILE - 1) // K_TILE
    if Q_HEADS > 0:  # noqa: SIM102
        if tile < K_START:
            _move_heads(
                q_ptr, q_target_ptr + token * Q_ROW, batch, position, q_batch, q_head, q_sequence, q_last, cos_ptr, sin_ptr,
                tile * Q_TILE, Q_HEADS, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BACKWARD, Q_TILE, HALF_BLOCK, REST_BLOCK,
            )  # fmt: skip
    if K_HEADS > 0:  # noqa: SIM102
        if (tile >= K_START) & (tile < V_START):
            _move_heads(
                k_ptr, k_target_ptr + token * K_ROW, batch, position, k_batch, k_head, k_sequence, k_last, cos_ptr, sin_ptr,
                (tile - K_START) * K_TILE, K_HEADS, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BACKWARD, K_TILE, HALF_BLOCK, REST_BLOCK,
            )  # fmt: skip
    if V_HEADS > 0:  # noqa: SIM102
        if tile >= V_START:
            _move_heads(
                v_ptr, v_target_ptr + token * V_ROW, batch, position, v_batch, v_head, v_sequence, v_last, cos_ptr, sin_ptr,
                (tile - V_START) * V_TILE, V_HEADS, HEAD_DIM, 0, False, BACKWARD, V_TILE, 1, HEAD_BLOCK,
            )  # fmt: skip


@triton.jit
def _move_heads(
    source_ptr, target_ptr, batch, position, source_batch, source_head, source_sequence, source_last, cos_ptr, sin_ptr, first,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
    TILE: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the first ROTARY_DIM elements of TILE heads of a token, from head `first` on, and copy the rest.

    Without a source (a gradient that is None) it writes zeros.
    """
    head = first + tl.arange(0, TILE)[:, None]
    target_ptr += head * HEAD_DIM
    if source_ptr is not None:
        source_ptr += batch * source_batch + position * source_sequence + head.to(tl.int64) * source_head
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        pair = tl.arange(0, HALF_BLOCK)[None, :]
        pair_mask = (head < HEADS) & (pair < HALF)
        cos = tl.load(cos_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        if BACKWARD:
            sin = -sin
        if source_ptr is None:
            zero = tl.zeros((TILE, HALF_BLOCK), target_ptr.dtype.element_ty)
            tl.store(target_ptr + pair, zero, mask=pair_mask)
            tl.store(target_ptr + HALF + pair, zero, mask=pair_mask)
        elif INTERLEAVED:  # neighbours are loaded together and parted in registers: whole cache lines each way
            column = tl.arange(0, 2 * HALF_BLOCK)[None, :]
            mask = (head < HEADS) & (column < ROTARY_DIM)
            both = tl.load(source_ptr + column * source_last, mask=mask, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(both, (TILE, HALF_BLOCK, 2)))
            turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (TILE, 2 * HALF_BLOCK))
            tl.store(target_ptr + column, turned.to(target_ptr.dtype.element_ty), mask=mask)
        else:
            a = tl.load(source_ptr + pair * source_last, mask=pair_mask, other=0.0).to(tl.float32)
            b = tl.load(source_ptr + (HALF + pair) * source_last, mask=pair_mask, other=0.0).to(tl.float32)
            tl.store(target_ptr + pair, (a * cos - b * sin).to(target_ptr.dtype.element_ty), mask=pair_mask)
            tl.store(target_ptr + HALF + pair, (b * cos + a * sin).to(target_ptr.dtype.element_ty), mask=pair_mask)
    if HEAD_DIM > ROTARY_DIM:
        column = ROTARY_DIM + tl.arange(0, REST_BLOCK)[None, :]
        mask = (head < HEADS) & (column < HEAD_DIM)
        if source_ptr is None:
            tl.store(target_ptr + column, tl.zeros((TILE, REST_BLOCK), target_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(target_ptr + column, tl.load(source_ptr + column * source_last, mask=mask), mask=mask)


def refuses(q, k, cos, sin, interleaved):
    return misfit(q, k, cos, sin) or unsupported(q.shape[-1], q, k, cos, sin)


def unsupported(head_dim, *tensors):
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return "float64 input: the kernel computes in float32"
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} above {MAX_HEAD_DIM}: a head must fit one program's registers"
    return None


def forward(needs, q, k, cos, sin, interleaved):
    return _rotate(q, k, cos, sin, interleaved, False), ()


def backward(needs, gradients, *, cos, sin, interleaved):
    dq, dk = (gradient if needed else None for gradient, needed in zip(gradients, needs))
    return (None, None) if dq is None and dk is None else _rotate(dq, dk, cos, sin, interleaved, True)


def _rotate(q, k, cos, sin, interleaved, is_backward):
    """q and k, each [batch, heads, sequence, head_dim] of any strides or None, rotated into new tensors (or None)."""
    targets = [None if x is None else token_major(x.shape, x) for x in (q, k)]
    heads = [0 if x is None else x.shape[1] for x in (q, k)]
    head_dim = (k if q is None else q).shape[-1]
    move_heads(
        (q, k, None), (*targets, None), (*heads, 0), [count * head_dim for count in heads] + [0],
        head_dim, cos, sin, interleaved, is_backward,
    )  # fmt: skip
    return tuple(targets)


def token_major(shape, like, dtype=None):
    """An empty [batch, heads, sequence, head_dim] tensor that is contiguous as [batch, sequence, heads, head_dim]."""
    batch, heads, sequence, head_dim = shape
    return torch.empty(batch, sequence, heads, head_dim, dtype=dtype or like.dtype, device=like.device).transpose(1, 2)


def move_heads(sources, targets, heads, rows, head_dim, cos, sin, interleaved, is_backward):
    """Launch the kernel over queries, keys and values.

    Args:
        sources: three [batch, heads, sequence, head_dim] tensors of any strides; None reads as zeros.
        targets: three tensors whose starts count, to take a token's heads contiguously; None for a part without heads.
        heads: the parts' numbers of heads; 0 for a part to be left out.
        rows: the distance of tokens in each target, in elements.
        is_backward: rotate by the negative angle.
    """
    cos, sin = (angle if angle.stride(-1) == 1 else angle.contiguous() for angle in (cos, sin))
    batch, sequence, rotary_dim = next(t for t in sources if t is not None).shape[0], cos.shape[1], cos.shape[2]
    half_block, rest_block = next_power_of_2(max(rotary_dim // 2, 1)), next_power_of_2(max(head_dim - rotary_dim, 1))
    tiles = [heads_per_tile(count, head_dim) for count in heads]
    launch(
        _rope_kernel, (batch * sequence, sum(triton.cdiv(*pair) for pair in zip(heads, tiles))),
        cos, sin, *sources, *targets, *angle_strides(cos), *angle_strides(sin),
        *(stride for source in sources for stride in ((0, 0, 0, 0) if source is None else source.stride())), sequence,
        Q_HEADS=heads[0], K_HEADS=heads[1], V_HEADS=heads[2], Q_ROW=rows[0], K_ROW=rows[1], V_ROW=rows[2],
        HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, INTERLEAVED=interleaved, BACKWARD=is_backward,
        Q_TILE=tiles[0], K_TILE=tiles[1], V_TILE=tiles[2],
        HALF_BLOCK=half_block, REST_BLOCK=rest_block, HEAD_BLOCK=next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip


def angle_strides(angle):
    return angle.stride(0) if angle.shape[0] > 1 else 0, angle.stride(1)


def heads_per_tile(heads: int, head_dim: int) -> int:
    """Heads of one program: at most 4096 elements, 32 for each of its 128 threads."""
    return min(next_power_of_2(max(heads, 1)), max(1, 4096 // next_power_of_2(head_dim)))
