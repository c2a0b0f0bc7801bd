import itertools
import math

import pytest
import torch
from checks import EPSILON, assert_close, check_op, gradients
from torch import nn
from torch.nn.functional import linear, silu

from liger_models import ops
from liger_models.kernels import registry
from liger_models.kernels.fused_moe import fused_moe

GPT_OSS = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
NAMES = registry.contracts()["fused_moe"].names
TENSORS = ("x", "expert_weights", "gate_up_weight", "down_weight", "gate_up_bias", "down_bias")
# sums of at most 20 products in fp32, one after another, and of at most 12 rows
TOLERANCE = 64 * EPSILON[torch.float32]


def random(*shape, dtype=torch.float32, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def chosen(tokens, experts, top_k, seed=0, device="cpu"):
    """Each token's `top_k` different experts."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator, device=device).topk(top_k).indices


def tensors(
    tokens=5, *, top_k=2, experts=6, hidden=20, intermediate=12, bias=True, dtype=torch.float32, ids=None, device="cpu"
):
    """The op's tensors, weights scaled so that every tensor inside has elements of size one."""
    ids = chosen(tokens, experts, top_k, device=device) if ids is None else ids
    make = {"dtype": dtype, "device": device}
    return [
        random(tokens, hidden, **make),
        ids,
        torch.softmax(random(*ids.shape, seed=1, device=device), -1).to(dtype),
        random(experts, 2 * intermediate, hidden, seed=2, **make).div_(hidden**0.5),
        random(experts, hidden, intermediate, seed=3, **make).div_(intermediate**0.5),
        random(experts, 2 * intermediate, seed=4, **make) if bias else None,
        random(experts, hidden, seed=5, **make) if bias else None,
    ]


def leaves(arguments, device="cpu", frozen=()):
    """Copies on a device, floating-point ones with gradients unless their names are in `frozen`."""
    result = [a if a is None else a.detach().to(device, copy=True) for a in arguments]
    for name, leaf in zip(NAMES, result):
        if leaf is not None and leaf.is_floating_point():
            leaf.requires_grad_(name not in frozen)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize("options", [{}, GPT_OSS, {"limit": 0.5}], ids=["swiglu", "gpt-oss", "limit"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("top_k", [1, 4])
def test_matches_fp64(device, options, bias, top_k):
    check_op(
        "fused_moe", *tensors(top_k=top_k, bias=bias), **options, backend="triton", tolerance=TOLERANCE, device=device
    )  # fmt: skip


ROUTES = {
    "every token to every expert": torch.arange(8).expand(3, 8),
    "all to one": torch.full((5, 1), 3),
    "all twice to one": torch.full((5, 2), 7),
    "one token": torch.tensor([[4, 1]]),
    "only the first": torch.zeros(2, 1, dtype=torch.int64),
    "int32": torch.tensor([[4, 1], [0, 7]], dtype=torch.int32),
    "no token": torch.zeros(0, 2, dtype=torch.int64),
    "no expert": torch.zeros(3, 0, dtype=torch.int64),
    "some to other ranks": torch.tensor([[8, 1], [2, 9], [8, 8], [7, 0]]),
}


@pytest.mark.parametrize("route", ROUTES)
def test_routes(device, route):
    ids = ROUTES[route]
    check_op(
        "fused_moe", *tensors(len(ids), experts=8, ids=ids), **GPT_OSS, backend="triton", tolerance=TOLERANCE, device=device
    )  # fmt: skip


def test_more_rows_than_a_tile_holds(device):
    # two experts' rows end inside a tile, one expert's fill three
    ids = torch.cat([torch.zeros(130, 1), torch.ones(3, 1), torch.full((70, 1), 3)]).long()
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    # sums of up to 130 rows
    check_op(
        "fused_moe", *tensors(len(ids), experts=4, hidden=4, intermediate=4, ids=ids), backend="triton",
        tolerance=2 * TOLERANCE, device=device,
    )  # fmt: skip


@pytest.mark.parametrize(
    "sizes",
    [{"hidden": 1}, {"intermediate": 1}, {"hidden": 3, "intermediate": 2052}, {"hidden": 2052, "intermediate": 3}],
)
def test_odd_sizes(device, sizes):
    # sums of at most 2052 products, whose error grows with the square root of their number
    arguments = tensors(1, experts=2, top_k=1, **sizes)
    check_op("fused_moe", *arguments, **GPT_OSS, backend="triton", tolerance=TOLERANCE, device=device)


def test_non_contiguous_tensors(device):
    x, ids, expert_weights, gate_up_weight, down_weight, gate_up_bias, down_bias = tensors()
    strided = [
        torch.stack((x, x), -1)[..., 0], ids.t().contiguous().t(), expert_weights.t().contiguous().t(),
        gate_up_weight.transpose(1, 2).contiguous().transpose(1, 2), torch.cat((down_weight, down_weight), 2)[..., :12],
        gate_up_bias.t().contiguous().t(), torch.stack((down_bias, down_bias))[1],
    ]  # fmt: skip
    assert sum(t.is_contiguous() for t in strided) == 1
    check_op("fused_moe", *strided, backend="triton", tolerance=TOLERANCE, device=device)


@pytest.mark.parametrize("wanted", [c for n in range(len(TENSORS)) for c in itertools.combinations(TENSORS, n)][::5])
def test_frozen_inputs_get_no_gradient(device, wanted):
    check_op("fused_moe", *tensors(3), backend="triton", tolerance=TOLERANCE, wanted=wanted, device=device)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_weights_of_another_dtype(device, backend):
    """Routers give fp32 weights beside bf16 or fp16 activations: the gradient is theirs."""
    arguments = tensors(dtype=torch.float16)
    arguments[2] = arguments[2].float()
    # five tensors are rounded to fp16 on the way, each by half a spacing of its largest element
    check_op("fused_moe", *arguments, backend=backend, tolerance=3 * EPSILON[torch.float16], device=device)
    placed = leaves(arguments, device)
    with ops.use_backend(backend):
        y = ops.fused_moe(*placed)
    y.sum().backward()
    assert y.dtype == torch.float16
    assert placed[2].grad.dtype == torch.float32
    assert placed[3].grad.dtype == torch.float16


class StockExperts(nn.Module):
    """The routed experts of one token at a time, as the formula says: no library's code, no loop over experts."""

    def forward(self, x, ids, weights, gate_up_weight, down_weight):
        rows = []
        for token, experts, shares in zip(x, ids, weights):
            blocks = []
            for expert in experts:
                gate, up = linear(token, gate_up_weight[expert]).chunk(2)
                blocks.append(linear(silu(gate) * up, down_weight[expert]))
            rows.append((torch.stack(blocks) * shares[:, None]).sum(0))
        return torch.stack(rows)


def test_reference_is_the_formula_token_by_token():
    arguments = [a.double() if a is not None and a.is_floating_point() else a for a in tensors(bias=False)][:5]
    expected = gradients(StockExperts(), arguments, NAMES, TENSORS[:4])
    assert_close(gradients(fused_moe, arguments, NAMES, TENSORS[:4]), expected, 1e-14)  # fp64: sums of 20


def test_reference_equals_stock_experts():
    """GptOssExperts and Qwen3MoeExperts of transformers, gradients too."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": 20, "num_experts_per_tok": 2}
    oss = GptOssExperts(GptOssConfig(**sizes, intermediate_size=12, num_local_experts=6)).double()
    qwen = Qwen3MoeExperts(Qwen3MoeConfig(**sizes, moe_intermediate_size=12, num_experts=6)).double()
    values = [a if a is None or not a.is_floating_point() else 4 * a.double() for a in tensors(12)]
    x, gate_up_weight, gate_up_bias = (values[NAMES.index(name)] for name in ("x", "gate_up_weight", "gate_up_bias"))

    def gpt_oss(x, ids, shares, gate_up_weight, down_weight, gate_up_bias, down_bias):
        # stock interleaves gate and up, and its weights are [in, out]
        parameters = {
            "gate_up_proj": torch.stack(gate_up_weight.chunk(2, 1), 2).flatten(1, 2).transpose(1, 2),
            "gate_up_proj_bias": torch.stack(gate_up_bias.chunk(2, 1), 2).flatten(1, 2),
            "down_proj": down_weight.transpose(1, 2), "down_proj_bias": down_bias,
        }  # fmt: skip
        return torch.func.functional_call(oss, parameters, (x, ids, shares))

    def qwen3(x, ids, shares, gate_up_weight, down_weight):
        return torch.func.functional_call(qwen, {"gate_up_proj": gate_up_weight, "down_proj": down_weight}, (x, ids, shares))

    expected = gradients(gpt_oss, values, NAMES, TENSORS)
    h = torch.einsum("th,eih->tei", x, gate_up_weight) + gate_up_bias
    assert (h.abs() > 7).any() and (h.abs() < 7).any()  # some are clamped
    assert_close(gradients(lambda *a: fused_moe(*a, **GPT_OSS), values, NAMES, TENSORS), expected, 1e-13)  # fp64: sums of 24
    expected = gradients(qwen3, values[:5], NAMES, TENSORS[:4])
    assert_close(gradients(fused_moe, values[:5], NAMES, TENSORS[:4]), expected, 1e-13)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_clamping_by_hand(device, backend):
    """A gate of 8 counts as 7 and an up of -9 as -7: (-7 + 1) * 7 * sigmoid(1.702 * 7); neither has a gradient."""

    def step(gate, up):
        # x is one; the biases are the gate and the up value; the output is the activation twice, and a bias
        x, ids, weights = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
        gate_up_bias, down = torch.tensor([[gate, up]]), torch.full((1, 1, 1), 2.0)
        arguments = leaves([x, ids, weights, torch.zeros(1, 2, 1), down, gate_up_bias, torch.zeros(1, 1)], device)
        with ops.use_backend(backend):
            y = ops.fused_moe(*arguments, **GPT_OSS)
        y.backward()
        return y.item() / 2, arguments[5].grad.flatten().tolist()

    value, slopes = step(8.0, -9.0)
    assert value == pytest.approx(-41.99972, abs=5e-6)
    assert slopes == [0.0, 0.0]
    sigmoid = 1 / (1 + math.exp(-1.702 * 7))
    value, slopes = step(7.0, -7.0)  # on the limit the gradient passes
    assert value == pytest.approx(-42 * sigmoid, rel=1e-6)
    # fp32: 1 - sigmoid has an error of half a spacing of one
    assert slopes == pytest.approx([2 * -6 * sigmoid * (1 + 1.702 * 7 * (1 - sigmoid)), 2 * 7 * sigmoid], rel=2e-6)
    assert step(-20.0, 9.0)[1][1] == 0.0  # a gate has no lower limit
    assert step(-3.0, 0.5)[1] != [0.0, 0.0]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("options", [{}, GPT_OSS])
def test_nan_stays(device, backend, options):
    arguments = leaves(tensors(3, ids=torch.tensor([[0], [1], [0]])), device)
    with torch.no_grad():
        arguments[0][1, 0] = float("nan")
    with ops.use_backend(backend):
        y = ops.fused_moe(*arguments, **options)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_unused_experts_have_zero_gradients(device, backend):
    arguments = leaves(tensors(3, experts=5, ids=torch.tensor([[1, 3], [3, 1], [1, 3]])), device)
    with ops.use_backend(backend):
        ops.fused_moe(*arguments).sum().backward()
    for name, tensor in list(zip(NAMES, arguments))[3:]:
        used = [bool(part.any()) for part in tensor.grad]
        assert used == [False, True, False, True, False], name
        assert tensor.grad.isfinite().all(), name


# ---------------------------------------------------------------------------------------------------------------------
# What is computed and kept


def counted_products(monkeypatch):
    """The names of the grouped products as they are called."""
    from liger_models.kernels.backends.triton import fused_moe as implementation

    calls = []
    for name in ("rows_by_weights", "rows_by_rows"):
        plain = getattr(implementation, name)

        def spy(*arguments, name=name, plain=plain):
            calls.append(name)
            return plain(*arguments)

        monkeypatch.setattr(implementation, name, spy)
    return calls


@pytest.mark.parametrize(
    ("wanted", "rows", "weights"),
    [
        (TENSORS, 2, 2),
        (("x", "expert_weights"), 2, 0),  # frozen experts
        (("x",), 2, 0),
        (("expert_weights",), 1, 0),
        (("down_weight",), 0, 1),
        (("gate_up_weight",), 1, 1),
        (("gate_up_bias",), 1, 0),
        (("down_bias",), 0, 0),
    ],
)
def test_frozen_tensors_cost_no_product(device, monkeypatch, wanted, rows, weights):
    arguments = leaves(tensors(3), device, frozen=set(TENSORS) - set(wanted))
    calls = counted_products(monkeypatch)
    with ops.use_backend("triton"):
        y = ops.fused_moe(*arguments)
        assert calls == ["rows_by_weights"] * 2
        calls.clear()
        y.sum().backward()
    assert (calls.count("rows_by_weights"), calls.count("rows_by_rows")) == (rows, weights)


def test_keeps_the_arguments_the_projection_and_the_routing_only(device):
    arguments = leaves(tensors(), device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), ops.use_backend("triton"):
        ops.fused_moe(*arguments)
    given = {a.data_ptr() for a in arguments}
    new = [t for t in kept if t.data_ptr() not in given]
    # 10 rows: their order and its inverse, the ends of 6 experts, the projection
    assert sorted((t.numel(), t.dtype) for t in new if t.dtype == torch.int32) == [
        (6, torch.int32), (10, torch.int32), (10, torch.int32),
    ]  # fmt: skip
    assert [t.shape for t in new if t.dtype != torch.int32] == [(10, 24)]


def test_without_gradients_the_projection_is_freed_before_the_second_product(device, monkeypatch):
    import weakref

    from liger_models.kernels.backends.triton import fused_moe as implementation

    freed, first, plain = [], [], implementation.rows_by_weights

    def spy(*arguments):
        freed.extend(reference() is None for reference in first)
        result = plain(*arguments)
        first.append(weakref.ref(result))
        return result

    monkeypatch.setattr(implementation, "rows_by_weights", spy)
    with ops.use_backend("triton"):
        with torch.no_grad():
            ops.fused_moe(*leaves(tensors(), device))
        assert freed == [True]
        freed.clear(), first.clear()
        ops.fused_moe(*leaves(tensors(), device))
        assert freed == [False]


def test_backward_leaves_kept_tensors_and_gradient_alone(device):
    arguments = leaves(tensors(), device)
    values = [a.detach().clone() for a in arguments]
    gradient = random(5, 20, seed=7).to(device)
    before = gradient.clone()
    with ops.use_backend("triton"):
        y = ops.fused_moe(*arguments, **GPT_OSS)
    wanted = [a for a in arguments if a.requires_grad]
    first = torch.autograd.grad(y, wanted, gradient, retain_graph=True)
    second = torch.autograd.grad(y, wanted, gradient)
    assert all(a.equal(b) for a, b in zip(first, second))
    assert gradient.equal(before)
    assert all(a.equal(b) for a, b in zip(arguments, values))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_wrong_arguments(device, backend):
    x, ids, shares, gate_up_weight, down_weight, gate_up_bias, down_bias = leaves(tensors(), device)
    with ops.use_backend(backend):
        with pytest.raises(ValueError, match="2, 1, 3 and 3 dimensions"):
            ops.fused_moe(x, ids[:, 0], shares, gate_up_weight, down_weight)
        with pytest.raises(ValueError, match=r"expert_weights has the shape \(5, 1\), not \(5, 2\)"):
            ops.fused_moe(x, ids, shares[:, :1], gate_up_weight, down_weight)
        with pytest.raises(ValueError, match=r"gate_up_weight has the shape \(6, 23, 20\), not \(6, 24, 20\)"):
            ops.fused_moe(x, ids, shares, gate_up_weight[:, :23], down_weight)
        with pytest.raises(ValueError, match=r"gate_up_bias has the shape \(6, 20\), not \(6, 24\)"):
            ops.fused_moe(x, ids, shares, gate_up_weight, down_weight, down_bias, gate_up_bias)
        with pytest.raises(ValueError, match=r"down_weight is torch\.float16 and x is torch\.float32"):
            ops.fused_moe(x, ids, shares, gate_up_weight, down_weight.half())
        with pytest.raises(ValueError, match=r"expert_ids are torch\.float32"):
            ops.fused_moe(x, ids.float(), shares, gate_up_weight, down_weight)
        with pytest.raises((ValueError, ops.KernelUnavailableError), match=r"torch\.int64"):
            ops.fused_moe(x, ids, ids, gate_up_weight, down_weight)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_autocast(backend):
    """fp32 weights under autocast: as if x, weights and biases were cast; expert_weights are not. Gradients are fp32."""
    if backend == "triton" and not torch.cuda.is_available():
        pytest.skip("no CUDA device, and the interpreter has no right bf16 product")
    device = "cuda" if backend == "triton" else "cpu"
    arguments = leaves(tensors(), device)
    cast = leaves([a.bfloat16() if n in TENSORS and n != "expert_weights" else a for n, a in zip(NAMES, arguments)], device)
    with ops.use_backend(backend):
        expected = ops.fused_moe(*cast, **GPT_OSS)
        with torch.autocast(device, torch.bfloat16):
            actual = ops.fused_moe(*arguments, **GPT_OSS)
    assert actual.dtype == torch.bfloat16
    assert actual.equal(expected)
    expected.sum().backward()
    actual.sum().backward()
    for name, a, e in zip(NAMES, arguments, cast):
        assert a.grad is None or (a.grad.dtype == torch.float32 and a.grad.equal(e.grad.float())), name


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("frozen", [(), ("x", "down_weight")])
def test_compiled(device, compiler, frozen):
    def step(function):
        arguments = leaves(tensors(), device, frozen)
        y = function(*arguments, **GPT_OSS)
        (y * y).sum().backward()
        return [y.detach(), *(a.grad for a in arguments)]

    torch.compiler.reset()
    with ops.use_backend("triton"):
        expected = step(ops.fused_moe)
        actual = step(torch.compile(ops.fused_moe, fullgraph=True, backend=compiler))
    for name, a, e in zip(("output", *NAMES), actual, expected):
        assert (a is None) == (e is None) == (name in frozen or name == "expert_ids")
        assert a is None or a.equal(e), name


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


REAL = {
    "gpt-oss": ({"tokens": 512, "top_k": 4, "experts": 32, "hidden": 2880, "intermediate": 2880}, GPT_OSS),
    "qwen3": ({"tokens": 512, "top_k": 8, "experts": 128, "hidden": 2048, "intermediate": 768, "bias": False}, {}),
    "odd": ({"tokens": 512, "top_k": 2, "experts": 8, "hidden": 250, "intermediate": 130}, GPT_OSS),  # the Triton product
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL)
@pytest.mark.parametrize("unused", [0, 3])
def test_bfloat16_at_real_sizes(cuda, case, unused):
    sizes, options = REAL[case]
    ids = chosen(sizes["tokens"], sizes["experts"] - unused, sizes["top_k"], device="cuda")
    arguments = tensors(**sizes, ids=ids, dtype=torch.bfloat16, device="cuda")
    given = [name for name, a in zip(NAMES, arguments) if name in TENSORS and a is not None]
    wide = [a.float() if a is not None and a.is_floating_point() else a for a in arguments]
    expected = gradients(lambda *a: fused_moe(*a, **options), wide, NAMES, given)
    with ops.use_backend("triton"):
        actual = gradients(lambda *a: ops.fused_moe(*a, **options), arguments, NAMES, given)
    # six tensors are rounded on the way to a weight's gradient, each by half a spacing; relative to the largest element
    assert_close(actual, expected, 3 * EPSILON[torch.bfloat16])
    for name in ("gate_up_weight", "down_weight"):
        assert not actual[f"gradient of {name}"][sizes["experts"] - unused :].any()


@pytest.mark.gpu
def test_large_bfloat16_uses_the_library(cuda, monkeypatch):
    if torch.version.hip is not None or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("torch's grouped product is used on NVIDIA GPUs from compute capability 9.0 on")
    calls, plain = [], torch._grouped_mm
    monkeypatch.setattr(torch, "_grouped_mm", lambda *a, **k: calls.append(a[1].dim()) or plain(*a, **k))
    with ops.use_backend("triton"):
        ops.fused_moe(*leaves(tensors(64, hidden=64, intermediate=32, dtype=torch.bfloat16), "cuda")).sum().backward()
    assert calls == [3, 3, 3, 2, 2, 3]


@pytest.mark.gpu
def test_more_tokens_than_a_grid_axis(cuda):
    ids = chosen(65537, 5, 2, device="cuda")
    arguments = tensors(65537, experts=5, hidden=16, intermediate=8, ids=ids, device="cuda")
    exact = [a.double() if a is not None and a.is_floating_point() else a for a in arguments]
    expected = gradients(fused_moe, exact, NAMES, TENSORS)
    with ops.use_backend("triton"):
        actual = gradients(ops.fused_moe, arguments, NAMES, TENSORS)
    # sums of 26000 rows in fp32, one after another, in random directions: an error of some hundred roundings
    assert_close(actual, expected, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)  # the library's product, and Triton's
def test_experts_beyond_2_to_the_31_elements(cuda, dtype):
    """All tokens go to the last expert, whose weights begin past 2**31 elements; the others' gradients are zero."""
    experts, hidden, intermediate, tokens = 9, 8192, 16384, 5
    last, generator = experts - 1, torch.Generator("cuda").manual_seed(0)

    def drawn(*size):
        return torch.randn(size, generator=generator, device="cuda", dtype=dtype) * size[-1] ** -0.5

    x, gate_up, down = (
        drawn(*size).requires_grad_()
        for size in ((tokens, hidden), (experts, 2 * intermediate, hidden), (experts, hidden, intermediate))
    )
    assert last * 2 * intermediate * hidden >= 2**31
    ids, weights = torch.full((tokens, 1), last, device="cuda"), torch.ones(tokens, 1, device="cuda", dtype=dtype)
    with ops.use_backend("triton"):
        y = ops.fused_moe(x, ids, weights, gate_up, down)
        y.sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, gate_up[last:], down[last:])]
    right = fused_moe(exact[0], ids - last, weights.double(), *exact[1:])
    right.sum().backward()
    # In bf16 half a dozen roundings in a row; in fp32 the products' sums, whose errors grow with the root of their length.
    allowed = 8 * EPSILON[dtype] if dtype == torch.bfloat16 else intermediate**0.5 * EPSILON[dtype] / 2
    actual = {"y": y, "x": x.grad, "gate_up": gate_up.grad[last:], "down": down.grad[last:]}
    expected = {"y": right, "x": exact[0].grad, "gate_up": exact[1].grad, "down": exact[2].grad}
    for name, tensor in actual.items():
        error = (tensor.double() - expected[name]).norm() / expected[name].norm()
        assert error <= allowed, f"{name}: {error}"
    assert not gate_up.grad[:last].any() and not down.grad[:last].any()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [{}, {"hidden": 64, "intermediate": 32, "dtype": torch.bfloat16}])
def test_the_host_never_waits(cuda, sizes):
    arguments = leaves(tensors(64, **sizes), "cuda")
    with ops.use_backend("triton"):
        ops.fused_moe(*arguments, **GPT_OSS).sum().backward()  # kernels are compiled and loaded, which may wait
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ops.fused_moe(*arguments, **GPT_OSS).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
