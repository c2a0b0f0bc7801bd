"""Where a kernel test runs: Triton's interpreter on CPU, a CUDA device where there is one (marked `gpu`)."""

import pytest
import torch

from liger_models.kernels import registry


def poison(*size, dtype=None, device=None, **options):
    """torch.empty whose floating-point content is NaN: an element that a kernel forgets to write shows."""
    tensor = _empty(*size, dtype=dtype, device=device, **options)
    if tensor.is_floating_point() and tensor.device.type != "meta":
        with torch.no_grad():
            tensor.fill_(float("nan"))
    return tensor


_empty = torch.empty


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    monkeypatch.setattr(torch, "empty", poison)


@pytest.fixture(autouse=True)
def resolved_anew():
    """Kernels resolved for the CPU while Triton interprets must not serve the tests of other folders in this process."""
    registry._forget_resolved()
    yield
    registry._forget_resolved()


def round_to_bfloat16_as_hardware_does(monkeypatch):
    """Triton's interpreter cuts fp32 off at bf16, an error of up to a whole spacing; compiled kernels round to nearest even."""
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding_mode):
        if source != language.float32 or target != language.bfloat16:
            return convert(data, source, target, rounding_mode)
        values = torch.from_numpy(data.reshape(-1).view("float32").copy())
        return values.bfloat16().view(torch.uint16).numpy().reshape(data.shape)  # bits, as the interpreter keeps a bf16

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> str:
    """The device of a test of Triton kernels."""
    if request.param == "cpu":
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled for the GPU in this process, not interpreted")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        round_to_bfloat16_as_hardware_does(monkeypatch)
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param
