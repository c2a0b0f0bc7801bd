import pytest
import torch
from checks import EPSILON, check_op

from liger_models import ops
from liger_models.kernels.rope import rope

# Two products and a sum, in fp32; gradients the same
FP32 = 4 * EPSILON[torch.float32]


def heads(*shape, dtype=torch.float32):
    """[batch, heads, sequence, head_dim] as stock attention makes it: a transposed view."""
    batch, count, sequence, head_dim = shape
    return torch.randn(batch, sequence, count, head_dim).to(dtype).transpose(1, 2)


def angles(batch, sequence, rotary_dim, start=0, dtype=torch.float32):
    """cos and sin as stock rotary embeddings make them: every frequency twice."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1))
    positions = start + torch.arange(sequence, dtype=torch.float64)[None, :] + 7 * torch.arange(batch)[:, None]
    angle = torch.cat([positions[..., None] * frequencies] * 2, -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 4, 2, 5, 8, 8), (1, 3, 3, 1, 10, 4), (2, 5, 1, 3, 12, 12), (2, 2, 1, 0, 8, 8), (1, 2, 1, 3, 6, 0)]
)
def test_matches_fp64(device, shape, interleaved):
    batch, query_heads, key_value_heads, sequence, head_dim, rotary_dim = shape
    q, k = heads(batch, query_heads, sequence, head_dim), heads(batch, key_value_heads, sequence, head_dim)
    for batches in {1, batch}:
        check_op(
            "rope", q, k, *angles(batches, sequence, rotary_dim), interleaved, backend="triton", tolerance=FP32, device=device
        )


def test_more_heads_than_a_program_takes(device):
    q, k = heads(1, 70, 2, 128), heads(1, 40, 2, 128)  # tiles of 32 heads
    check_op("rope", q, k, *angles(1, 2, 128), backend="triton", tolerance=FP32, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_half_precision(device, dtype, interleaved):
    q, k = heads(2, 4, 5, 16, dtype=dtype), heads(2, 2, 5, 16, dtype=dtype)
    # Outputs are rounded once, half a spacing. Gradients come from rounded ones: half a spacing of
    # two, turned (up to 2**0.5 / 2 in sum), then rounded.
    check_op("rope", q, k, *angles(1, 5, 8), interleaved, backend="triton", tolerance=1.25 * EPSILON[dtype], device=device)


def test_far_positions_in_half_precision(device):
    # Report O43: bf16 queries at position 32768 keep fp32 angles. The report allows 1e-2; one rounding to bf16 is 2**-8.
    q, k = heads(1, 2, 3, 64, dtype=torch.bfloat16), heads(1, 1, 3, 64, dtype=torch.bfloat16)
    exact = rope(q.double(), k.double(), *angles(1, 3, 64, start=32768, dtype=torch.float64))
    with ops.use_backend("triton"):
        actual = ops.rope(q.to(device), k.to(device), *(a.to(device) for a in angles(1, 3, 64, start=32768)))
    for mine, theirs in zip(actual, exact):
        assert mine.dtype == torch.bfloat16
        # the angles' own rounding to fp32 comes on top of the rounding of the result
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("interleaved", "rotary_dim", "partner"), [(False, 8, 4), (True, 8, 1), (False, 4, 2), (True, 4, 1)])
def test_pairing(device, backend, interleaved, rotary_dim, partner):
    # Report O42: with head_dim 8 the unit vector e0 turns towards index 4 (half-split) or 1 (neighbours), or with half of the
    # dimensions rotary, 2.
    q = torch.eye(8)[:1].reshape(1, 1, 1, 8).to(device)
    cos, sin = (torch.full((1, 1, rotary_dim), value, device=device) for value in (0.6, 0.8))
    with ops.use_backend(backend):
        rotated, _ = ops.rope(q, q, cos, sin, interleaved)
    expected = torch.zeros(8)
    expected[0], expected[partner] = 0.6, 0.8
    assert torch.equal(rotated.flatten().cpu(), expected)


def test_partial_rotation_leaves_the_rest_alone(device):
    # Report O41: a factor of 1/4. Elements that are no numbers behind rotary_dim must not spread.
    q = heads(1, 2, 3, 16)
    q[..., 4:] = torch.inf
    with ops.use_backend("triton"):
        rotated, _ = ops.rope(q.to(device), q.to(device), *(a.to(device) for a in angles(1, 3, 4)))
    expected = rope(q.double(), q.double(), *angles(1, 3, 4))[0]
    torch.testing.assert_close(rotated.cpu().double(), expected, rtol=FP32, atol=FP32)
    assert torch.isfinite(rotated[..., :4]).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_reference_equals_stock(interleaved, rotary_dim):
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as stock_glm
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as stock_llama

    q, k, (cos, sin) = heads(2, 4, 5, 16), heads(2, 2, 5, 16), angles(2, 5, rotary_dim)
    ours = rope(q, k, cos, sin, interleaved)
    if interleaved:
        expected = stock_glm(q, k, cos, sin)
    else:  # stock Llama rotates all that it is given
        turned = stock_llama(q[..., :rotary_dim], k[..., :rotary_dim], cos, sin)
        expected = [torch.cat((t, x[..., rotary_dim:]), -1) for t, x in zip(turned, (q, k))]
    for mine, theirs in zip(ours, expected):
        assert torch.equal(mine, theirs)


def test_output_suits_attention(device):
    with ops.use_backend("triton"):
        q, k = ops.rope(heads(2, 4, 3, 8).to(device), heads(2, 2, 3, 8).to(device), *(a.to(device) for a in angles(1, 3, 8)))
    assert q.transpose(1, 2).is_contiguous() and k.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("k_shape", "angle_shape", "message"),
    [
        ((2, 2, 4, 8), (1, 3, 8), "number of heads only"),
        ((2, 2, 3, 8), (3, 3, 8), r"\[2 or 1, 3, rotary_dim\]"),
        ((2, 2, 3, 8), (1, 3, 7), "must be even"),
        ((2, 2, 3, 8), (1, 3, 10), "at most head_dim, 8"),
    ],
)
def test_misfits_are_errors(k_shape, angle_shape, message):
    angle = torch.zeros(angle_shape)
    with pytest.raises(ValueError, match=message):
        rope(torch.zeros(2, 4, 3, 8), torch.zeros(k_shape), angle, angle)
