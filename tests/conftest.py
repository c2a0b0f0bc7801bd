"""What tests of several folders need: checkpoints and models of every family; a device that Triton's kernels run on."""

import pytest
import torch
from models.families import Case, randomise

from liger_models.kernels import registry


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Folder of the stock checkpoint of a case and head; written once."""
    folders = {}

    def folder_of(case: Case, head: str = "causal_lm", **options):
        key = (case, head, repr(options))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(str(case))
            configuration = case.configuration()
            configuration.update(options)
            torch.manual_seed(0)  # sinks and routers' biases are drawn, and randomise() keeps near them
            model = case.family.stock(head)(configuration)
            randomise(model)
            model.save_pretrained(folders[key])
        return folders[key]

    return folder_of


@pytest.fixture(scope="session")
def build(checkpoint):
    """Load a case's checkpoint, as `"stock"` or as `"native"`, with the options of from_pretrained."""

    def load(kind: str, case: Case, head: str = "causal_lm", saved_as: str | None = None, saved_with=None, **options):
        folder = checkpoint(case, saved_as or head, **(saved_with or {}))
        if kind == "stock":  # transformers before 5.24 runs Gemma 2 on sdpa unasked, which leaves its cap out
            options.setdefault("attn_implementation", case.family.attentions[-1])
            if case.family.experts:  # its default, grouped products, has neither fp64 nor odd sizes
                options.setdefault("experts_implementation", "eager")
        return getattr(case.family, kind)(head).from_pretrained(folder, **options).train(False)

    return load


@pytest.fixture(scope="session")
def pair(build):
    """The stock and the native model of one checkpoint, in eval mode."""

    def load(case: Case, head: str = "causal_lm", **options):
        return build("stock", case, head, **options), build("native", case, head, **options)

    return load


def poison(*size, dtype=None, device=None, **options):
    """torch.empty whose floating-point content is NaN: an element that a kernel forgets to write shows."""
    tensor = _empty(*size, dtype=dtype, device=device, **options)
    if tensor.is_floating_point() and tensor.device.type != "meta":
        with torch.no_grad():
            tensor.fill_(float("nan"))
    return tensor


_empty = torch.empty


@pytest.fixture
def poisoned_empty(monkeypatch):
    monkeypatch.setattr(torch, "empty", poison)


@pytest.fixture
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
    """Where a test of Triton kernels runs: in Triton's interpreter on CPU, or on a CUDA device (marked `gpu`)."""
    if request.param == "cpu":
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled for the GPU in this process, not interpreted")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        round_to_bfloat16_as_hardware_does(monkeypatch)
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@pytest.fixture
def cuda() -> None:
    """For tests that run on a CUDA device only (marked `gpu`)."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
