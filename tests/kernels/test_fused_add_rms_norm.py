import pytest
import torch
from checks import EPSILON, check_op

from liger_models import ops
from liger_models.kernels.fused_add_rms_norm import fused_add_rms_norm
from liger_models.kernels.rms_norm import rms_norm

STYLES = {"llama": {}, "gemma": {"offset": 1.0, "scale_in_fp32": True}}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", [(2, 3, 8), (5, 7), (1, 3), (0, 16), (33, 129)])
def test_matches_fp64(device, style, shape):
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    # fp32 throughout; sums of up to 33 * 129 products for the gradients
    check_op(
        "fused_add_rms_norm", x, residual, weight, backend="triton", tolerance=64 * EPSILON[torch.float32], device=device,
        **STYLES[style],
    )  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.bfloat16, torch.float32)])
def test_half_precision(device, dtypes, style):
    x, residual, weight = torch.randn(16, 64).to(dtypes[0]), torch.randn(16, 64).to(dtypes[1]), torch.randn(64).to(dtypes[0])
    # The sum is rounded, then two roundings as in rms_norm (three in the llama style), each of half a spacing at most
    check_op(
        "fused_add_rms_norm", x, residual, weight, backend="triton", tolerance=2 * EPSILON[dtypes[0]], device=device,
        **STYLES[style],
    )  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_the_sum_is_rounded_before_it_is_normalised(device, style):
    x, residual = torch.randn(2, 64, 256).bfloat16().to(device)
    weight = torch.randn(256).bfloat16().to(device)
    with ops.use_backend("triton"):
        normed, summed = ops.fused_add_rms_norm(x, residual, weight, **STYLES[style])
        assert torch.equal(summed, x + residual)
        assert torch.equal(normed, ops.rms_norm(x + residual, weight, **STYLES[style]))  # the same kernel: bit for bit


def test_reference_is_the_two_steps():
    x, residual, weight = torch.randn(4, 8).bfloat16(), torch.randn(4, 8).bfloat16(), torch.randn(8).bfloat16()
    normed, summed = fused_add_rms_norm(x, residual, weight)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight))


def test_backward_keeps_neither_input(device):
    x, residual = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, device=device, requires_grad=True)
    with ops.use_backend("triton"):
        normed, summed = ops.fused_add_rms_norm(x, residual, weight)
    kept = {tensor.data_ptr() for tensor in normed.grad_fn.saved_tensors}
    assert summed.data_ptr() in kept
    assert not kept & {x.data_ptr(), residual.data_ptr()}


def test_mixed_dtypes_get_gradients_of_their_own_dtype(device):
    for compiled in (False, True):
        x = torch.randn(4, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
        residual = torch.randn(4, 8, device=device, requires_grad=True)
        function = (
            torch.compile(ops.fused_add_rms_norm, fullgraph=True, backend="aot_eager") if compiled else ops.fused_add_rms_norm
        )
        with ops.use_backend("triton"):
            normed, summed = function(x, residual, torch.ones(8, device=device))
            (normed.sin().sum() + summed.cos().sum()).backward()
        assert (x.grad.dtype, residual.grad.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(x.grad, residual.grad.bfloat16())


def used_everywhere(op):
    """x and residual feed other ops before and after the op under test, whose gradients accumulate with its own."""

    def function(x, residual, weight):
        before = (x * residual).sum()
        normed, summed = op(x, residual, weight)
        again, total = op(normed.sin(), summed, weight)
        return (
            before + again.cos().sum() + (total * residual).sum() + (x.exp() * summed).sum() + op(x, x, weight)[0].tan().sum()
        )

    return function


def leaves_directly(op):
    return lambda x, residual, weight: sum((output * output).sum() for output in op(x, residual, weight))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("use", [used_everywhere, leaves_directly])
def test_one_gradient_for_two_inputs_is_not_accumulated_into_twice(device, use, compiled):
    # The backward returns one tensor for x and residual. Autograd adds to gradients in place and hands them to leaves.
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 8), (4, 8), (8,))]
    exact = [value.clone().requires_grad_() for value in values]
    actual = [value.float().to(device).requires_grad_() for value in values]
    function = use(ops.fused_add_rms_norm)
    if compiled:
        torch.compiler.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # the second round adds to the gradients of the first
        use(fused_add_rms_norm)(*exact).backward()
        with ops.use_backend("triton"):
            function(*actual).backward()
    for mine, theirs in zip(actual, exact):
        # A chain of a dozen fp32 steps, whose terms cancel: relative to the largest element. A GPU's reciprocal square root is
        # two spacings off and enters to the third power.
        error = (mine.grad.cpu().double() - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert error <= 256 * 2.0**-23
    assert actual[0].grad.data_ptr() != actual[1].grad.data_ptr()


def test_different_shapes_are_an_error():
    x, residual, weight = torch.randn(4, 8), torch.randn(1, 8), torch.randn(8)
    with pytest.raises(ValueError, match=r"x has shape \(4, 8\), residual \(1, 8\)"):
        fused_add_rms_norm(x, residual, weight)
