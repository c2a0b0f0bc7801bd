import pytest
import torch
from checks import EPSILON, check_op

from liger_models import ops
from liger_models.kernels.rms_norm import rms_norm

STYLES = {"llama": {}, "gemma": {"offset": 1.0, "scale_in_fp32": True}}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", [(2, 3, 8), (5, 7), (1, 3), (0, 16), (33, 129)])
def test_matches_fp64(device, style, shape):
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(shape, generator=generator), torch.randn(shape[-1], generator=generator)
    # fp32 throughout; sums of up to 33 * 129 products for the gradients
    check_op(
        "rms_norm", x, weight, 1e-6, backend="triton", tolerance=64 * EPSILON[torch.float32], device=device, **STYLES[style]
    )


@pytest.mark.parametrize("wanted", [[], ["x"], ["weight"]])
def test_frozen_inputs_get_no_gradient(device, wanted):
    x, weight = torch.randn(4, 8), torch.randn(8)
    check_op("rms_norm", x, weight, backend="triton", tolerance=1e-5, wanted=wanted, device=device)


def test_no_weight(device):
    check_op("rms_norm", torch.randn(4, 8), None, backend="triton", tolerance=1e-5, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", STYLES)
def test_half_precision(device, dtype, style):
    x, weight = torch.randn(16, 64).to(dtype), torch.randn(64).to(dtype)
    # two roundings (three in the llama style) of at most half a spacing each, gradients of 16 rows rounded once
    check_op("rms_norm", x, weight, backend="triton", tolerance=2 * EPSILON[dtype], device=device, **STYLES[style])


def test_non_contiguous_input(device):
    x = torch.randn(8, 6, 16).transpose(0, 1)[:, ::2, :]
    check_op("rms_norm", x, torch.randn(16), backend="triton", tolerance=1e-5, device=device)


@pytest.mark.parametrize("shape", [(37, 128), (5, 1024), (70, 2048)])
def test_several_rows_per_program(device, shape):
    # Tiles that the rows do not fill: 37 rows in tiles of 16 and 32, one of 2 forwards and 4 backwards, 70 rows in tiles of 2.
    # Sums of up to 2048 products of size 1 in an order of their own: errors grow as the root of the number of terms, below 64
    check_op(
        "rms_norm",
        torch.randn(shape),
        torch.randn(shape[1]),
        backend="triton",
        tolerance=64 * EPSILON[torch.float32],
        device=device,
    )


def test_mixed_dtypes(device):
    x, weight = torch.randn(16, 64).bfloat16(), torch.randn(64)
    # fp32 output of a value rounded to bf16 once, and gradients rounded to bf16 once
    check_op("rms_norm", x, weight, backend="triton", tolerance=EPSILON[torch.bfloat16], device=device)


def test_fp16_activations_that_overflow_when_squared(device):
    # Report O32: 6e4 squared is beyond fp16. The result is that of fp32 input, rounded once (twice in the backward's sum).
    x = torch.full((4, 32), 6e4, dtype=torch.float16) * torch.tensor([1.0, -1.0]).half().repeat(16)
    check_op("rms_norm", x, torch.randn(32).half(), backend="triton", tolerance=2 * EPSILON[torch.float16], device=device)


@pytest.mark.parametrize("wanted", [["x"], ["weight"]])
def test_frozen_inputs_allocate_nothing(device, wanted, monkeypatch):
    # Report O21: a peer computed the gradient of a frozen weight.
    x = torch.randn(4, 8, device=device, requires_grad="x" in wanted)
    weight = torch.randn(8, device=device, requires_grad="weight" in wanted)
    with ops.use_backend("triton"):
        y = ops.rms_norm(x, weight)
    allocated, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: allocated.append(size) or empty(*size, **options))
    y.backward(torch.ones_like(y))
    assert allocated == ([((4, 8),)] if wanted == ["x"] else [(1, 8)])


def stock_norm(style: str, weight: torch.Tensor) -> torch.nn.Module:
    if style == "llama":
        from transformers.models.llama.modeling_llama import LlamaRMSNorm as Norm
    else:
        from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm as Norm
    norm = Norm(weight.shape[0], eps=1e-5)
    norm.weight = torch.nn.Parameter(weight.clone())
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", STYLES)
def test_reference_equals_stock_bit_for_bit(style, dtype):
    x, weight = torch.randn(16, 64).to(dtype), torch.randn(64).to(dtype)
    norm, ours, theirs = stock_norm(style, weight), x.clone().requires_grad_(), x.clone().requires_grad_()
    own_weight = weight.clone().requires_grad_()
    output, expected = rms_norm(ours, own_weight, 1e-5, **STYLES[style]), norm(theirs)
    dy = torch.randn(16, 64).to(dtype)
    output.backward(dy)
    expected.backward(dy)
    assert output.dtype == expected.dtype
    assert torch.equal(output, expected)
    assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(own_weight.grad, norm.weight.grad)
