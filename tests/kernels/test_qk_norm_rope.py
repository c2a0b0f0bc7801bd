import pytest
import torch
from checks import EPSILON, check_op, gradients

from liger_models import ops
from liger_models.kernels.qk_norm_rope import qk_norm_rope
from liger_models.kernels.rms_norm import rms_norm
from liger_models.kernels.rope import rope

# A mean of up to 80 squares, a root, three products and a sum in fp32; backwards the same and one more sum over the head.
FP32 = 16 * EPSILON[torch.float32]
NUMBERS = {"llama": (1e-6, 0.0, False), "gemma": (1e-5, 1.0, True)}
numbers = pytest.mark.parametrize("norm", NUMBERS.values(), ids=NUMBERS)


def angles(*shape):
    angle = torch.randn(shape)
    return angle.cos(), angle.sin()


def weights(head_dim, dtype=torch.float32):
    return [(1 + 0.3 * torch.randn(head_dim)).to(dtype) for _ in range(2)]


@numbers
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("batch", "sequence", "head_dim", "rotary_dim"),
    [(2, 3, 8, 8), (1, 5, 10, 4), (2, 1, 12, 12), (0, 4, 8, 8), (2, 0, 8, 8), (1, 2, 80, 80)],
)
def test_matches_fp64(device, batch, sequence, head_dim, rotary_dim, interleaved, norm):
    qkv = torch.randn(batch, sequence, (5 + 2 * 2) * head_dim)
    check_op(
        "qk_norm_rope", qkv, *weights(head_dim), *angles(1, sequence, rotary_dim), 5, 2, *norm, interleaved,
        backend="triton", tolerance=FP32, device=device,
    )  # fmt: skip


@numbers
def test_more_heads_than_one_tile(device, norm):
    """70 query and 33 key heads of 64: three tiles and two."""
    qkv = torch.randn(1, 3, (70 + 2 * 33) * 64)
    check_op(
        "qk_norm_rope", qkv, *weights(64), *angles(1, 3, 64), 70, 33, *norm, backend="triton", tolerance=2 * FP32, device=device
    )


def test_angles_for_each_sequence(device):
    check_op(
        "qk_norm_rope", torch.randn(3, 4, 6 * 8), *weights(8), *angles(3, 4, 8), 4, 1,
        backend="triton", tolerance=FP32, device=device,
    )  # fmt: skip


@numbers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device, dtype, norm):
    qkv = torch.randn(2, 3, 6 * 16).to(dtype)
    # The norm rounds up to twice, the rotation sums two rounded terms and rounds; gradients are of rounded gradients.
    check_op(
        "qk_norm_rope", qkv, *weights(16, dtype), *angles(1, 3, 16), 2, 2, *norm,
        backend="triton", tolerance=3 * EPSILON[dtype], device=device,
    )  # fmt: skip


@numbers
def test_weights_of_another_dtype(device, norm):
    """As under autocast: the projection is in bf16 and the weights are in fp32."""
    qkv, (cos, sin) = torch.randn(1, 2, 4 * 8).bfloat16().to(device), (a.to(device) for a in angles(1, 2, 8))
    own = [weight.to(device) for weight in weights(8)]
    with ops.use_backend("triton"):
        actual = ops.qk_norm_rope(qkv, *own, cos, sin, 2, 1, *norm)
    for mine, theirs in zip(actual, qk_norm_rope(qkv, *own, cos, sin, 2, 1, *norm)):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2 * EPSILON[torch.bfloat16], atol=1e-6)


def test_strided_input(device):
    qkv = torch.randn(3, 4, 2, 6 * 8)[:, :, 1].transpose(0, 1)
    check_op(
        "qk_norm_rope", qkv, *weights(8), *angles(1, 3, 8), 4, 1, backend="triton", tolerance=FP32, device=device
    )  # fmt: skip


def _composed(rms_norm, rope, qkv, q_weight, k_weight, cos, sin, *norm):
    q, k, v = (part.unflatten(-1, (-1, 16)) for part in qkv.split([64, 32, 32], -1))
    q, k = rms_norm(q, q_weight, *norm).transpose(1, 2), rms_norm(k, k_weight, *norm).transpose(1, 2)
    return *rope(q, k, cos, sin), v.transpose(1, 2)


@numbers
def test_equals_splitting_norm_and_rope(device, norm):
    qkv, (cos, sin) = torch.randn(2, 3, 8 * 16, device=device), (a.to(device) for a in angles(1, 3, 16))
    own = [weight.to(device) for weight in weights(16)]
    for mine, theirs in zip(
        qk_norm_rope(qkv, *own, cos, sin, 4, 2, *norm), _composed(rms_norm, rope, qkv, *own, cos, sin, *norm)
    ):
        assert torch.equal(mine, theirs)
        assert mine.transpose(1, 2).is_contiguous()
    with ops.use_backend("triton"):
        expected = _composed(ops.rms_norm, ops.rope, qkv, *own, cos, sin, *norm)
        actual = ops.qk_norm_rope(qkv, *own, cos, sin, 4, 2, *norm)
    for mine, theirs in zip(actual, expected):
        # The sum of squares is formed in another order: the last bit of rstd.
        torch.testing.assert_close(mine, theirs, rtol=4 * EPSILON[torch.float32], atol=2 * EPSILON[torch.float32])
        assert mine.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("unused", ["q", "k", "v", "q and k"])
def test_unused_outputs(device, unused):
    """An output that stays out of the loss gives zeros, not what was in memory."""

    def loss(op):
        def function(qkv, q_weight, k_weight, cos, sin):
            outputs = dict(zip(("q", "k", "v"), op(qkv, q_weight, k_weight, cos, sin, 4, 2)))
            used = torch.cat([(i + 1.5) * t.flatten() ** 2 for i, (n, t) in enumerate(outputs.items()) if n not in unused])
            return used + 0.0 * (q_weight.sum() + k_weight.sum())  # so that the reference has gradients, zeros, for all

        return function

    arguments = [torch.randn(2, 3, 8 * 16), *weights(16), *angles(1, 3, 16)]
    names = ["qkv", "q_weight", "k_weight", "cos", "sin"]
    expected = gradients(loss(qk_norm_rope), [t.double() for t in arguments], names, names[:3])
    with ops.use_backend("triton"):
        actual = gradients(loss(ops.qk_norm_rope), [t.to(device) for t in arguments], names, names[:3])
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor.cpu().double(), expected[name], rtol=1e-4, atol=1e-5)  # sums in fp32


def test_through_attention(device):
    # Attention returns gradients in layouts of its own.
    def attend(op):
        def function(qkv, q_weight, k_weight, cos, sin):
            q, k, v = op(qkv, q_weight, k_weight, cos, sin, 4, 2)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        return function

    arguments = [torch.randn(2, 5, 8 * 8), *weights(8), *angles(1, 5, 8)]
    names = ["qkv", "q_weight", "k_weight", "cos", "sin"]
    expected = gradients(attend(qk_norm_rope), [t.double() for t in arguments], names, names[:3])
    with ops.use_backend("triton"):
        actual = gradients(attend(ops.qk_norm_rope), [t.to(device) for t in arguments], names, names[:3])
    for name, tensor in actual.items():
        # an attention of 5 keys in fp32
        torch.testing.assert_close(tensor.cpu().double(), expected[name], rtol=1e-4, atol=1e-5)


def test_backward_keeps_only_its_arguments(device):
    qkv, (cos, sin) = torch.randn(2, 3, 48, device=device, requires_grad=True), (a.to(device) for a in angles(1, 3, 8))
    own = [weight.to(device).requires_grad_() for weight in weights(8)]
    with ops.use_backend("triton"):
        q, _, _ = ops.qk_norm_rope(qkv, *own, cos, sin, 4, 1)
    assert {t.data_ptr() for t in q.grad_fn.saved_tensors} == {t.data_ptr() for t in (qkv, *own, cos, sin)}


@pytest.mark.parametrize("frozen", ["qkv", "q_weight", "k_weight", "weights"])
def test_what_is_frozen_gets_no_gradient(device, frozen):
    arguments = dict(zip(("qkv", "q_weight", "k_weight"), (torch.randn(2, 3, 48), *weights(8))))
    cos, sin = angles(1, 3, 8)

    def run(op, to):
        own = {
            name: tensor.clone().to(to).requires_grad_(frozen not in name and not (frozen == "weights" and "weight" in name))
            for name, tensor in arguments.items()
        }
        q, k, v = op(*own.values(), cos.to(to), sin.to(to), 4, 1)
        (q.sum() + (k**2).sum() + (v * 3).sum()).backward()
        return {name: tensor.grad for name, tensor in own.items()}

    expected = run(qk_norm_rope, "cpu")
    with ops.use_backend("triton"):
        actual = run(ops.qk_norm_rope, device)
    assert [name for name, g in actual.items() if g is None] == [name for name, g in expected.items() if g is None]
    for name, gradient in actual.items():
        if gradient is not None:
            torch.testing.assert_close(gradient.cpu(), expected[name], rtol=1e-5, atol=1e-5)


def test_misfits_are_errors():
    with pytest.raises(ValueError, match=r"4 query and 1 key-value heads.*6 \* head_dim"):
        qk_norm_rope(torch.zeros(2, 3, 50), *weights(8), *angles(1, 3, 8), 4, 1)
    with pytest.raises(ValueError, match="at most head_dim, 8"):
        qk_norm_rope(torch.zeros(2, 3, 48), *weights(8), *angles(1, 3, 10), 4, 1)
    with pytest.raises(ValueError, match=r"both must be \[8\] in one dtype"):
        qk_norm_rope(torch.zeros(2, 3, 48), *weights(7), *angles(1, 3, 8), 4, 1)
