import itertools
import weakref

import pytest
import torch
from checks import EPSILON, check_op
from torch import nn
from torch.nn.functional import linear

from liger_models import ops
from liger_models.kernels.gated_mlp import ACTIVATIONS, gated_mlp

TENSORS = ("x", "gate_up_weight", "down_weight", "gate_up_bias", "down_bias")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(*batch, hidden=12, intermediate=20, out=9, bias=True, dtype=torch.float32):
    """x, both weights and both biases; weights scaled so that every tensor inside has elements of size one."""
    return [
        random(*batch, hidden, dtype=dtype),
        random(2 * intermediate, hidden, seed=1).div(hidden**0.5).to(dtype),
        random(out, intermediate, seed=2).div(max(intermediate, 1) ** 0.5).to(dtype),
        random(2 * intermediate, dtype=dtype, seed=3) if bias else None,
        random(out, dtype=dtype, seed=4) if bias else None,
    ]


def on(device, arguments, grad=True):
    return [a if a is None else a.detach().to(device, copy=True).requires_grad_(grad) for a in arguments]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [(2, 3), (7,), (), (0,), (2, 0)])
def test_matches_fp64(device, activation, bias, batch):
    # sums of at most 20 products in fp32, twice
    check_op(
        "gated_mlp", *tensors(*batch, bias=bias), activation, backend="triton",
        tolerance=64 * EPSILON[torch.float32], device=device,
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [{"hidden": 1}, {"intermediate": 1}, {"intermediate": 0}, {"out": 1}, {"intermediate": 1037}])
def test_odd_sizes(device, sizes):
    # sums of at most 1037 products, whose error grows with the square root of their number
    check_op("gated_mlp", *tensors(3, **sizes), backend="triton", tolerance=64 * EPSILON[torch.float32], device=device)


@pytest.mark.parametrize("wanted", [c for n in range(len(TENSORS)) for c in itertools.combinations(TENSORS, n)])
def test_frozen_inputs_get_no_gradient(device, wanted):
    check_op("gated_mlp", *tensors(2, 3), backend="triton", tolerance=1e-5, wanted=wanted, device=device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device, activation, dtype):
    # on the way to a weight's gradient six tensors are rounded by half a spacing each; relative to the largest element
    check_op(
        "gated_mlp", *tensors(4, 16, hidden=64, intermediate=96, dtype=dtype), activation, backend="triton",
        tolerance=3 * EPSILON[dtype], device=device,
    )  # fmt: skip


def test_non_contiguous_tensors(device):
    x, gate_up_weight, _, *biases = tensors(3, 5)
    strided = [x.transpose(0, 1), gate_up_weight.t().contiguous().t(), random(9, 40, seed=2).div(20**0.5)[:, ::2]]
    assert not any(t.is_contiguous() for t in strided)
    check_op("gated_mlp", *strided, *biases, backend="triton", tolerance=1e-5, device=device)


def test_expanded_gradient(device):
    actual, exact = on(device, tensors(2, 3)), on("cpu", [t.double() for t in tensors(2, 3)])
    with ops.use_backend("triton"):
        ops.gated_mlp(*actual).sum().backward()
    gated_mlp(*exact).sum().backward()
    for tensor, reference in zip(actual, exact):
        torch.testing.assert_close(tensor.grad.cpu().double(), reference.grad, rtol=1e-4, atol=1e-5)


class StockMLP(nn.Module):
    """The block as stock classes write it: three linear layers."""

    def __init__(self, gate_up_weight, down_weight, gate_up_bias, down_bias):
        super().__init__()
        self.gate, self.up = zip(gate_up_weight.chunk(2), (None, None) if gate_up_bias is None else gate_up_bias.chunk(2))
        self.down = (down_weight, down_bias)

    def forward(self, x):
        return linear(nn.functional.silu(linear(x, *self.gate)) * linear(x, *self.up), *self.down)


@pytest.mark.parametrize("bias", [False, True])
def test_reference_is_bit_equal_to_stock_in_bfloat16(bias):
    # x of small integers and weights of 0 and ±1: the products are exact, in whatever order a library adds them, up to the
    # activation, which both must round alike; the last product adds one hot row of it
    x = torch.randint(-3, 4, (32, 16), generator=torch.Generator().manual_seed(0)).bfloat16()
    gate_up_weight = torch.randint(-1, 2, (48, 16), generator=torch.Generator().manual_seed(1)).bfloat16()
    down_weight = torch.eye(24).bfloat16()
    biases = [torch.full((48,), 0.5).bfloat16(), torch.zeros(24).bfloat16()] if bias else [None, None]
    stock = StockMLP(gate_up_weight, down_weight, *biases)(x)
    assert gated_mlp(x, gate_up_weight, down_weight, *biases).equal(stock)


@pytest.mark.parametrize("bias", [False, True])
def test_keeps_the_input_the_projection_and_the_weights_only(device, bias):
    arguments = on(device, tensors(3, 5, bias=bias))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), ops.use_backend("triton"):
        ops.gated_mlp(*arguments)
    assert {t.data_ptr() for t in arguments[:3]} <= {t.data_ptr() for t in kept}
    assert sorted(t.numel() for t in kept) == sorted([*(t.numel() for t in arguments[:3]), 15 * 2 * 20])
    reference = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: reference.append(t) or t, lambda t: t), ops.use_backend("torch"):
        ops.gated_mlp(*arguments)
    assert 15 * 20 in {t.numel() for t in reference}  # what is saved: the reference keeps the activation's value


def test_without_gradients_the_projection_is_freed_before_the_second_product(device, monkeypatch):
    from liger_models.kernels.backends.triton import gated_mlp as implementation

    calls, first = [], []

    def spy(rows, weight, bias):
        calls.append(first[0]() is None if first else None)
        result = plain(rows, weight, bias)
        first.append(weakref.ref(result))
        return result

    plain = implementation._linear
    monkeypatch.setattr(implementation, "_linear", spy)
    with ops.use_backend("triton"):
        with torch.no_grad():
            ops.gated_mlp(*on(device, tensors(4)))
        assert calls == [None, True]
        calls.clear(), first.clear()
        ops.gated_mlp(*on(device, tensors(4)))
        assert calls == [None, False]


def test_backward_leaves_kept_tensors_and_gradient_alone(device):
    arguments = on(device, tensors(2, 3))
    values = [a.detach().clone() for a in arguments]
    gradient = random(2, 3, 9, seed=7).to(device)
    before = gradient.clone()
    with ops.use_backend("triton"):
        y = ops.gated_mlp(*arguments)
    first = torch.autograd.grad(y, arguments, gradient, retain_graph=True)
    second = torch.autograd.grad(y, arguments, gradient)
    assert all(a.equal(b) for a, b in zip(first, second))
    assert gradient.equal(before)
    assert all(a.equal(b) for a, b in zip(arguments, values))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_wrong_arguments(device, backend):
    x, gate_up_weight, down_weight, *_ = on(device, tensors(2))
    with ops.use_backend(backend):
        with pytest.raises(ValueError, match="activation='relu' is not one of 'silu', 'gelu', 'gelu_tanh'"):
            ops.gated_mlp(x, gate_up_weight, down_weight, activation="relu")
        with pytest.raises(ValueError, match="gate_up_weight has 39 rows, which is not twice the 20 columns of down_weight"):
            ops.gated_mlp(x, gate_up_weight[:39], down_weight)
        with pytest.raises(RuntimeError, match="dtype"):
            ops.gated_mlp(x.bfloat16(), gate_up_weight, down_weight)


def test_fp64_is_refused(device):
    arguments = [a.double() for a in on(device, tensors(2))]
    with ops.use_backend("triton"), pytest.raises(ops.KernelUnavailableError, match=r"gated_mlp.*triton.*float64"):
        ops.gated_mlp(*arguments)
    assert ops.gated_mlp(*arguments).equal(gated_mlp(*arguments))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_autocast(device, backend):
    """fp32 weights under autocast: computed in bfloat16 like torch's linear, gradients in fp32."""

    def step(function):
        leaves = on(device, tensors(4, 16, hidden=64, intermediate=96))
        with torch.autocast(device, torch.bfloat16):
            y = function(*leaves)
        y.backward(random(*y.shape, seed=7).to(y))
        return y, [leaf.grad for leaf in leaves]

    def stock(x, *weights):
        return StockMLP(*weights)(x)

    expected, expected_gradients = step(stock)
    with ops.use_backend(backend):
        actual, actual_gradients = step(ops.gated_mlp)
    assert actual.dtype == expected.dtype == torch.bfloat16
    # both round six tensors to bfloat16 on the way, each by half a spacing of its largest element
    for a, e in zip([actual, *actual_gradients], [expected, *expected_gradients]):
        assert a.dtype == e.dtype
        assert (a - e).abs().max() <= 6 * EPSILON[torch.bfloat16] / 2 * e.abs().max()


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("frozen", [(), (1,), (0, 2, 4)])
def test_compiled(device, compiler, frozen):
    def step(function):
        leaves = on(device, tensors(2, 3, dtype=torch.bfloat16))
        for index in frozen:
            leaves[index].requires_grad_(False)
        y = function(*leaves, activation="gelu_tanh")
        (y * y).sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    torch.compiler.reset()
    with ops.use_backend("triton"):
        expected = step(ops.gated_mlp)
        actual = step(torch.compile(ops.gated_mlp, fullgraph=True, backend=compiler))
    for index, (a, e) in enumerate(zip(actual, expected)):
        assert (a is None) == (e is None) == (index - 1 in frozen)
        assert a is None or (a.dtype == torch.bfloat16 and a.equal(e))


def test_compiled_for_changing_lengths(device):
    compiled = torch.compile(ops.gated_mlp, fullgraph=True, backend="aot_eager", dynamic=True)
    with ops.use_backend("triton"):
        for length in (3, 5, 8):
            arguments = on(device, tensors(2, length))
            assert compiled(*arguments).equal(ops.gated_mlp(*arguments))
