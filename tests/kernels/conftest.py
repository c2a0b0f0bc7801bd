"""Where a kernel test runs: Triton's interpreter on CPU, a CUDA device where there is one (marked `gpu`)."""

import pytest
import torch


def poison(*size, dtype=None, device=None, **options):
    """torch.empty whose floating-point content is NaN: an element that a kernel forgets to write shows."""
    tensor = _empty(*size, dtype=dtype, device=device, **options)
    if tensor.is_floating_point() and tensor.device.type != "meta":
        tensor.fill_(float("nan"))
    return tensor


_empty = torch.empty


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    monkeypatch.setattr(torch, "empty", poison)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> str:
    """The device of a test of Triton kernels."""
    if request.param == "cpu":
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled for the GPU in this process, not interpreted")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param
