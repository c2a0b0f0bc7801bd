import pytest
import torch
from checks import EPSILON, check_op

from liger_models import ops
from liger_models.kernels.backends.triton.launch import rows_of
from liger_models.kernels.swiglu import swiglu

SHAPES = [(2, 3, 8), (5, 7), (13,), (1, 1), (0, 16), (4, 0), (33, 129), (2, 2, 2100)]


def random(*shape, dtype=torch.float32, seed=0):
    # three standard deviations: the gate reaches the flat and the steep part of the activation
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_fp64(device, shape):
    # element-wise in fp32: a handful of roundings, and exp is right to about two spacings
    check_op(
        "swiglu", random(*shape), random(*shape, seed=1), backend="triton",
        tolerance=8 * EPSILON[torch.float32], device=device,
    )  # fmt: skip


@pytest.mark.parametrize("wanted", [[], ["gate"], ["up"]])
def test_frozen_inputs_get_no_gradient(device, wanted):
    check_op("swiglu", random(4, 9), random(4, 9, seed=1), backend="triton", tolerance=1e-6, wanted=wanted, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device, dtype):
    # the activation and the product are rounded by half a spacing each, at most one spacing of the result together
    check_op(
        "swiglu", random(16, 70, dtype=dtype), random(16, 70, dtype=dtype, seed=1), backend="triton",
        tolerance=1.01 * EPSILON[dtype], device=device,
    )  # fmt: skip


def test_promotes_mixed_dtypes(device):
    gate, up = random(4, 9, dtype=torch.bfloat16), random(4, 9, seed=1)
    with ops.use_backend("triton"):
        out = ops.swiglu(gate.to(device), up.to(device))
    assert out.dtype == swiglu(gate, up).dtype == torch.float32
    # only the activation is rounded to bfloat16: elements at a tie may fall either way
    torch.testing.assert_close(out.cpu(), swiglu(gate, up), rtol=EPSILON[torch.bfloat16], atol=0)


@pytest.mark.parametrize("layout", ["transposed", "every second column", "row-strided"])
def test_non_contiguous_inputs(device, layout):
    def strided(seed):
        if layout == "transposed":
            return random(6, 5, 16, seed=seed).transpose(0, 2)
        if layout == "every second column":
            return random(5, 6, 16, seed=seed)[..., ::2]
        return random(5, 6, 16, seed=seed)[..., 3:12]

    check_op("swiglu", strided(0), strided(1), backend="triton", tolerance=1e-6, device=device)


def test_chunks_of_a_packed_tensor_are_read_in_place(device):
    packed = random(2, 3, 2 * 24)
    for chunk in packed.chunk(2, dim=-1):
        assert rows_of(chunk).data_ptr() == chunk.data_ptr()
    exact, actual = packed.double().requires_grad_(), packed.clone().to(device).requires_grad_()
    swiglu(*exact.chunk(2, dim=-1)).square().sum().backward()
    with ops.use_backend("triton"):
        ops.swiglu(*actual.chunk(2, dim=-1)).square().sum().backward()
    torch.testing.assert_close(actual.grad.cpu().double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_expanded_gradient(device):
    gate, up = random(4, 9).to(device).requires_grad_(), random(4, 9, seed=1).to(device).requires_grad_()
    with ops.use_backend("triton"):
        ops.swiglu(gate, up).sum().backward()
    exact = [t.detach().cpu().double().requires_grad_() for t in (gate, up)]
    swiglu(*exact).sum().backward()
    for tensor, reference in zip((gate, up), exact):
        torch.testing.assert_close(tensor.grad.cpu().double(), reference.grad, rtol=1e-5, atol=1e-6)


def test_extreme_gates(device):
    gate = torch.tensor([[-3e38, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, 3e38]])
    # exact limits: silu is 0 far below and the identity far above, its slope 0 and 1
    for dtype in (torch.float32, torch.bfloat16):
        x = gate.to(device, dtype, copy=True).requires_grad_()
        with ops.use_backend("triton"):
            y = ops.swiglu(x, torch.ones_like(x))
        y.sum().backward()
        assert y.detach().cpu().equal(gate.to(dtype).clamp(min=0))
        assert x.grad.cpu().tolist() == [[0, 0, 0, 0.5, 0.5, 1, 1, 1]]


def test_reference_is_bit_equal_to_stock_in_bfloat16():
    gate, up = random(64, 64, dtype=torch.bfloat16), random(64, 64, dtype=torch.bfloat16, seed=1)
    stock = torch.nn.SiLU()(gate) * up
    assert swiglu(gate, up).equal(stock)
    assert not swiglu(gate.float(), up.float()).bfloat16().equal(stock)  # rounding once differs: the test can fail


def test_triton_rounds_the_activation_before_the_product(device):
    gate, up = random(64, 64, dtype=torch.bfloat16), random(64, 64, dtype=torch.bfloat16, seed=1)
    with ops.use_backend("triton"):
        actual = ops.swiglu(gate.to(device), up.to(device)).cpu()
    # exp differs between libraries by a few spacings of fp32, which move one bfloat16 rounding in thousands: allow eight of
    # 4096, where rounding once instead of twice moves hundreds
    assert (actual != swiglu(gate, up)).sum() <= 8
    assert (swiglu(gate.float(), up.float()).bfloat16() != swiglu(gate, up)).sum() > 200


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_shapes_are_not_broadcast(device, backend):
    with ops.use_backend(backend), pytest.raises(ValueError, match=r"one shape, got \(4, 8\) and \(1, 8\)"):
        ops.swiglu(random(4, 8).to(device), random(1, 8).to(device))


def test_fp64_is_refused(device):
    gate, up = random(4, 8).double().to(device), random(4, 8, seed=1).double().to(device)
    with ops.use_backend("triton"), pytest.raises(ops.KernelUnavailableError, match=r"swiglu.*triton.*float64"):
        ops.swiglu(gate, up)
    assert ops.swiglu(gate, up).equal(swiglu(gate, up))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled(device, compiler):
    gate, up = (random(6, 20, dtype=torch.bfloat16, seed=s).to(device) for s in (0, 1))

    def step(function):
        leaves = [t.clone().requires_grad_() for t in (gate, up)]
        out = function(*leaves)
        (out * out).sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    torch.compiler.reset()
    with ops.use_backend("triton"):
        expected = step(ops.swiglu)
        actual = step(torch.compile(ops.swiglu, fullgraph=True, backend=compiler))
    assert all(a.equal(e) and a.dtype == torch.bfloat16 for a, e in zip(actual, expected))
