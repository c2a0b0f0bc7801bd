import pytest
import torch
from checks import EPSILON, check_op

from liger_models import ops
from liger_models.kernels.geglu import geglu

APPROXIMATE = pytest.mark.parametrize("approximate", ["tanh", "none"])


def random(*shape, dtype=torch.float32, seed=0):
    # three standard deviations: the gate reaches the flat and the steep part of the activation
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@APPROXIMATE
@pytest.mark.parametrize("shape", [(2, 3, 8), (5, 7), (13,), (0, 16), (4, 0), (33, 129)])
def test_matches_fp64(device, approximate, shape):
    # element-wise in fp32; the exponent is up to about ten where its result still matters, and carries ten times its roundings
    check_op(
        "geglu", random(*shape), random(*shape, seed=1), approximate, backend="triton",
        tolerance=32 * EPSILON[torch.float32], device=device,
    )  # fmt: skip


def test_default_is_the_tanh_form(device):
    gate, up = random(8, 9).to(device), random(8, 9, seed=1).to(device)
    with ops.use_backend("triton"):
        default, tanh, exact = ops.geglu(gate, up), ops.geglu(gate, up, "tanh"), ops.geglu(gate, up, "none")
    assert default.equal(tanh)
    assert not default.equal(exact)


@APPROXIMATE
@pytest.mark.parametrize("wanted", [[], ["gate"], ["up"]])
def test_frozen_inputs_get_no_gradient(device, approximate, wanted):
    check_op(
        "geglu", random(4, 9), random(4, 9, seed=1), approximate, backend="triton", tolerance=4e-6, wanted=wanted, device=device
    )


@APPROXIMATE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device, approximate, dtype):
    # the activation and the product are rounded by half a spacing each, at most one spacing of the result together
    check_op(
        "geglu", random(16, 70, dtype=dtype), random(16, 70, dtype=dtype, seed=1), approximate, backend="triton",
        tolerance=1.01 * EPSILON[dtype], device=device,
    )  # fmt: skip


@APPROXIMATE
def test_non_contiguous_inputs(device, approximate):
    gate, up = random(5, 6, 16)[..., ::2], random(8, 5, 6, seed=1).permute(1, 2, 0)
    check_op("geglu", gate, up, approximate, backend="triton", tolerance=4e-6, device=device)


@APPROXIMATE
def test_expanded_gradient(device, approximate):
    gate, up = random(4, 9).to(device).requires_grad_(), random(4, 9, seed=1).to(device).requires_grad_()
    with ops.use_backend("triton"):
        ops.geglu(gate, up, approximate).sum().backward()
    exact = [t.detach().cpu().double().requires_grad_() for t in (gate, up)]
    geglu(*exact, approximate).sum().backward()
    for tensor, reference in zip((gate, up), exact):
        torch.testing.assert_close(tensor.grad.cpu().double(), reference.grad, rtol=1e-5, atol=1e-5)


@APPROXIMATE
def test_extreme_gates(device, approximate):
    gate = torch.tensor([[-1e18, -1e4, -100.0, 0.0, 100.0, 1e4, 1e18]])
    x = gate.to(device, copy=True).requires_grad_()
    with ops.use_backend("triton"):
        y = ops.geglu(x, torch.ones_like(x), approximate)
    y.sum().backward()
    # exact limits: gelu is 0 far below and the identity far above, its slope 0 and 1
    assert y.detach().cpu().equal(gate.clamp(min=0))
    assert x.grad.cpu().tolist() == [[0, 0, 0, 0.5, 1, 1, 1]]


@APPROXIMATE
def test_reference_is_bit_equal_to_stock_in_bfloat16(approximate):
    gate, up = random(64, 64, dtype=torch.bfloat16), random(64, 64, dtype=torch.bfloat16, seed=1)
    stock = torch.nn.GELU(approximate)(gate) * up
    assert geglu(gate, up, approximate).equal(stock)
    assert not geglu(gate.float(), up.float(), approximate).bfloat16().equal(stock)  # rounding once differs


@APPROXIMATE
def test_triton_rounds_the_activation_before_the_product(device, approximate):
    gate, up = random(64, 64, dtype=torch.bfloat16), random(64, 64, dtype=torch.bfloat16, seed=1)
    with ops.use_backend("triton"):
        actual = ops.geglu(gate.to(device), up.to(device), approximate).cpu()
    # The stock formula's own fp32 error moves results near -3 standard deviations, where 1 + tanh or 1 + erf cancels, so
    # bits differ for a few small values only; everything of size is rounded alike.
    expected = geglu(gate, up, approximate)
    of_size = gate > -2
    assert (actual != expected)[of_size].sum() <= 8
    assert (geglu(gate.float(), up.float(), approximate).bfloat16() != expected)[of_size].sum() > 100


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_wrong_arguments(device, backend):
    x = random(4, 8).to(device)
    with ops.use_backend(backend):
        with pytest.raises(ValueError, match="approximate='sigmoid' is not one of 'tanh', 'none'"):
            ops.geglu(x, x, "sigmoid")
        with pytest.raises(ValueError, match="one shape"):
            ops.geglu(x, x[:1])


def test_fp64_is_refused(device):
    gate, up = random(4, 8).double().to(device), random(4, 8, seed=1).double().to(device)
    with ops.use_backend("triton"), pytest.raises(ops.KernelUnavailableError, match=r"geglu.*triton.*float64"):
        ops.geglu(gate, up)
    assert ops.geglu(gate, up).equal(geglu(gate, up))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled(device, compiler):
    gate, up = (random(6, 20, dtype=torch.bfloat16, seed=s).to(device) for s in (0, 1))

    def step(function):
        leaves = [t.clone().requires_grad_() for t in (gate, up)]
        out = function(*leaves, approximate="none")
        (out * out).sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    torch.compiler.reset()
    with ops.use_backend("triton"):
        expected = step(ops.geglu)
        actual = step(torch.compile(ops.geglu, fullgraph=True, backend=compiler))
    assert all(a.equal(e) and a.dtype == torch.bfloat16 for a, e in zip(actual, expected))
