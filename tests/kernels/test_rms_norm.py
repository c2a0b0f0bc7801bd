import pytest
import torch
from checks import EPSILON, check_op

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
