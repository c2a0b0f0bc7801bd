import pytest
import torch
from checks import EPSILON, check_op, gradients

from liger_models import ops
from liger_models.kernels.qkv_rope import qkv_rope
from liger_models.kernels.rope import rope

# Two products and a sum, in fp32; gradients the same
FP32 = 4 * EPSILON[torch.float32]


def angles(*shape):
    angle = torch.randn(shape)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("batch", "sequence", "head_dim", "rotary_dim"),
    [(2, 3, 8, 8), (1, 5, 10, 4), (2, 1, 12, 12), (0, 4, 8, 8), (2, 0, 8, 8), (1, 2, 80, 80)],
)
def test_matches_fp64(device, batch, sequence, head_dim, rotary_dim, interleaved):
    qkv = torch.randn(batch, sequence, (5 + 2 * 2) * head_dim)
    check_op(
        "qkv_rope", qkv, *angles(1, sequence, rotary_dim), 5, 2, interleaved, backend="triton", tolerance=FP32, device=device
    )


def test_angles_for_each_sequence(device):
    check_op("qkv_rope", torch.randn(3, 4, 6 * 8), *angles(3, 4, 8), 4, 1, backend="triton", tolerance=FP32, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device, dtype):
    qkv = torch.randn(2, 3, 6 * 16).to(dtype)
    # as for rope: rounded outputs, and gradients of rounded gradients
    check_op("qkv_rope", qkv, *angles(1, 3, 16), 2, 2, backend="triton", tolerance=1.25 * EPSILON[dtype], device=device)


def test_strided_input(device):
    qkv = torch.randn(3, 4, 2, 6 * 8)[:, :, 1].transpose(0, 1)
    check_op("qkv_rope", qkv, *angles(1, 3, 8), 4, 1, backend="triton", tolerance=FP32, device=device)


def test_equals_splitting_and_rope(device):
    qkv, (cos, sin) = torch.randn(2, 3, 8 * 16, device=device), (a.to(device) for a in angles(1, 3, 16))
    q, k, v = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in qkv.split([64, 32, 32], -1))
    with ops.use_backend("triton"):
        expected, actual = (*ops.rope(q, k, cos, sin), v), ops.qkv_rope(qkv, cos, sin, 4, 2)
    for mine, theirs in zip(actual, expected):
        assert torch.equal(mine, theirs)
        assert mine.transpose(1, 2).is_contiguous()
    for mine, theirs in zip(qkv_rope(qkv, cos, sin, 4, 2), (*rope(q, k, cos, sin), v)):
        assert torch.equal(mine, theirs)
        assert mine.transpose(1, 2).is_contiguous()


def test_through_attention(device):
    # Attention returns gradients in layouts of its own, and with one output unused none at all.
    def attend(op):
        def function(qkv, cos, sin):
            q, k, v = op(qkv, cos, sin, 4, 2)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        return function

    qkv, (cos, sin) = torch.randn(2, 5, 8 * 8), angles(1, 5, 8)
    expected = gradients(attend(qkv_rope), [qkv.double(), cos.double(), sin.double()], ["qkv", "cos", "sin"], ["qkv"])
    with ops.use_backend("triton"):
        actual = gradients(attend(ops.qkv_rope), [t.to(device) for t in (qkv, cos, sin)], ["qkv", "cos", "sin"], ["qkv"])
    for name, tensor in actual.items():
        # an attention of 5 keys in fp32
        torch.testing.assert_close(tensor.cpu().double(), expected[name], rtol=1e-4, atol=1e-5)


def test_backward_keeps_only_the_angles(device):
    qkv, (cos, sin) = torch.randn(2, 3, 48, device=device, requires_grad=True), (a.to(device) for a in angles(1, 3, 8))
    with ops.use_backend("triton"):
        q, _, _ = ops.qkv_rope(qkv, cos, sin, 4, 1)
    assert [t.data_ptr() for t in q.grad_fn.saved_tensors] == [cos.data_ptr(), sin.data_ptr()]


def test_misfits_are_errors():
    with pytest.raises(ValueError, match=r"4 query and 1 key-value heads.*6 \* head_dim"):
        qkv_rope(torch.zeros(2, 3, 50), *angles(1, 3, 8), 4, 1)
    with pytest.raises(ValueError, match="at most head_dim, 8"):
        qkv_rope(torch.zeros(2, 3, 48), *angles(1, 3, 10), 4, 1)
