import importlib
import itertools

import pytest
import torch
from checks import EPSILON, check_op
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from liger_models import ops
from liger_models.kernels.cross_entropy import cross_entropy
from liger_models.kernels.fused_linear_cross_entropy import chunk_rows, fused_linear_cross_entropy

# fp32 throughout: products of 16 terms, and exp2 of arguments up to 10
TOLERANCE = 64 * EPSILON[torch.float32]
EXTRAS = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
ALL_OPTIONS = {"lse_square_scale": 1e-2, "label_smoothing": 0.1, "softcap": 2.0, "logit_scale": 1.7}


def example(rows: int = 10, hidden: int = 16, vocabulary: int = 129, seed: int = 0) -> tuple:
    """Hidden states, head, bias and targets, one of them ignored. Logits are of size 1."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, hidden, generator=generator)
    weight = torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5
    bias = torch.randn(vocabulary, generator=generator)
    target = torch.randint(0, vocabulary, (rows,), generator=generator)
    target[1:2] = -100
    return states, weight, target, bias


def class_weights(vocabulary: int) -> torch.Tensor:
    return torch.rand(vocabulary, generator=torch.Generator().manual_seed(9)) + 0.1


@pytest.fixture
def small_chunks(monkeypatch):
    """With memory_budget=1 a chunk has four rows."""
    module = importlib.import_module("liger_models.kernels.fused_linear_cross_entropy")
    monkeypatch.setattr(module, "MINIMUM_CHUNK_ROWS", 4)
    monkeypatch.setattr(module, "CHUNK_ROWS_MULTIPLE", 4)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "size", "budget", "expected"),
    [
        (0, 100, 2, None, 1),
        (7, 100, 2, None, 7),
        (8192, 128256, 2, None, 4096),  # 1 GiB holds 4185 rows: two chunks
        (8192, 262144, 2, None, 2048),  # exactly 2048 rows
        (8192, 128256, 4, None, 2048),
        (8192, 128256, 2, 1, 2048),  # the least
        (8192, 128256, 2, 2**40, 8192),
        (5000, 128256, 2, None, 2560),  # balanced: not 4096 and 904
        (4097, 262144, 2, None, 1536),  # three chunks of at most 2048
        (2049, 262144, 2, 0, 1280),
    ],
)
def test_chunk_rows(rows, vocabulary, size, budget, expected):
    assert chunk_rows(rows, vocabulary, size, budget) == expected


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reference_is_linear_and_cross_entropy(small_chunks, reduction, weighted):
    results = []
    class_weight = class_weights(129).double() if weighted else None
    options = {**ALL_OPTIONS, **EXTRAS, "reduction": reduction}
    for function in (
        lambda h, w, t, b: cross_entropy(functional.linear(h, w, b), t, class_weight, **options),
        lambda h, w, t, b: fused_linear_cross_entropy(h, w, t, b, class_weight, **options),
        lambda h, w, t, b: fused_linear_cross_entropy(h, w, t, b, class_weight, memory_budget=1, **options),
    ):
        states, weight, target, bias = example()
        leaves = [tensor.double().requires_grad_() for tensor in (states, weight, bias)]
        output = function(leaves[0], leaves[1], target, leaves[2])
        output.loss.sum().backward()
        results.append([*(tensor.detach() for tensor in output), *(leaf.grad for leaf in leaves)])
    for expected, one_chunk, chunks in zip(*results):
        torch.testing.assert_close(one_chunk, expected, rtol=1e-12, atol=1e-12)  # fp64
        torch.testing.assert_close(chunks, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("budget", [None, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("biased", "weighted", "options"),
    [
        (False, False, {}),
        (True, False, {"lse_square_scale": 1e-2}),
        (False, True, {"label_smoothing": 0.1}),
        (True, True, ALL_OPTIONS),
    ],
)
def test_matches_fp64(device, small_chunks, biased, weighted, options, reduction, budget):
    states, weight, target, bias = example()
    check_op(
        "fused_linear_cross_entropy", states, weight, target, bias if biased else None,
        class_weights(129) if weighted else None, backend="triton", tolerance=TOLERANCE, device=device,
        reduction=reduction, memory_budget=budget, **options, **EXTRAS,
    )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_frozen_inputs_get_no_gradient(device, small_chunks, backend, reduction):
    states, weight, target, bias = example(6, 8, 19)
    names = ("hidden", "weight", "bias")
    for wanted in itertools.chain.from_iterable(itertools.combinations(names, count) for count in range(4)):
        check_op(
            "fused_linear_cross_entropy", states, weight, target, bias, backend=backend, tolerance=TOLERANCE, wanted=wanted,
            device=device, reduction=reduction, memory_budget=1,
        )  # fmt: skip


@pytest.mark.parametrize("divisor", [torch.tensor(11), torch.tensor(3.5)])
def test_divisor(device, small_chunks, divisor):
    states, weight, target, _ = example()
    check_op(
        "fused_linear_cross_entropy", states, weight, target, backend="triton", tolerance=TOLERANCE, device=device,
        divisor=divisor, memory_budget=1, **ALL_OPTIONS, **EXTRAS,
    )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 129), (1, 1), (7, 3), (7, 1), (1, 129), (0, 1)])
def test_odd_sizes(device, rows, vocabulary, reduction):
    states, weight, target, bias = example(rows, 5, vocabulary)
    check_op(
        "fused_linear_cross_entropy", states, weight, target, bias, backend="triton", tolerance=TOLERANCE, device=device,
        reduction=reduction, lse_square_scale=1e-2, **EXTRAS,
    )  # fmt: skip


def test_non_contiguous(device, small_chunks):
    states, weight, target, bias = example(12)
    for layout in (states.view(3, 4, 16).transpose(0, 1), states.t().contiguous().t().view(3, 4, 16)):
        check_op(
            "fused_linear_cross_entropy", layout, weight.t().contiguous().t(), target.view(layout.shape[:2]), bias,
            backend="triton", tolerance=TOLERANCE, device=device, memory_budget=1,
        )  # fmt: skip
    check_op(
        "fused_linear_cross_entropy", states[:, ::2], weight[:, ::2], target, bias, backend="triton", tolerance=TOLERANCE,
        device=device,
    )  # fmt: skip


@pytest.mark.parametrize("accumulation_dtype", [None, torch.float32])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bfloat16(device, small_chunks, backend, accumulation_dtype):
    states, weight, target, bias = (
        tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in example(10, 16, 65)
    )
    logits = functional.linear(states.double(), weight.double(), bias.double())
    # Rounding of a logit to bf16, half a spacing of the largest, is a relative error of its probability; then a rounding of
    # the logits' gradient and of its products, and one of the partial sum per chunk, three here.
    tolerance = (logits.abs().max().item() + 2 + 3) * EPSILON[torch.bfloat16] / 2
    check_op(
        "fused_linear_cross_entropy", states, weight, target, bias, backend=backend, tolerance=tolerance, device=device,
        accumulation_dtype=accumulation_dtype, memory_budget=1,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_accumulation_in_fp32(device, small_chunks, backend):
    """Twelve chunks whose gradients of 2⁻¹¹ bf16 cannot add to 0.5, between two of 0.5: the order of the sum is free."""
    states = torch.full((56, 1), 2.0**-12)
    states[:4] = states[-4:] = 0.25
    target = torch.zeros(56, dtype=torch.int64)
    # The head is zero, so each probability is 1/2 and the gradient of the head is half the sum of the states, up to its sign.
    expected = 1.0 + 12 * 2.0**-11
    gradients = {}
    for dtype in (None, torch.float32):
        weight = torch.zeros(2, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
        with ops.use_backend(backend):
            loss = ops.fused_linear_cross_entropy(
                states.bfloat16().to(device),
                weight,
                target.to(device),
                reduction="sum",
                accumulation_dtype=dtype,
                memory_budget=1,
            )
        loss.backward()
        gradients[dtype] = weight.grad[1, 0].item()
    assert gradients[None] == 1.0
    assert gradients[torch.float32] == torch.tensor(expected).bfloat16().item() != 1.0


def test_float16_gradients_survive_a_loss_scale(device):
    """At 1/rows · 1/vocabulary the gradient of a logit is below float16's smallest number; times the scale it is not."""
    states, weight, target, _ = example(64, 16, 129)
    scale, divisor = 2.0**16, torch.tensor(2.0**20)
    leaf = states.half().to(device).requires_grad_()
    with ops.use_backend("triton"):
        loss = ops.fused_linear_cross_entropy(leaf, weight.half().to(device), target.to(device), divisor=divisor.to(device))
    (scale * loss).backward()
    exact = states.half().double().requires_grad_()
    (scale * fused_linear_cross_entropy(exact, weight.half().double(), target, divisor=divisor)).backward()
    error = (leaf.grad.cpu().double() - exact.grad).abs().max() / exact.grad.abs().max()
    assert error < 4 * EPSILON[torch.float16]  # logits, their gradient and its product are rounded once each


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"divisor": torch.tensor(0)}])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_all_rows_ignored(device, small_chunks, backend, options):
    states, weight, _, bias = example(6, 8, 19)
    leaves = [tensor.to(device).requires_grad_() for tensor in (states, weight, bias)]
    with ops.use_backend(backend):
        output = ops.fused_linear_cross_entropy(
            leaves[0], leaves[1], torch.full((6,), -100, device=device), leaves[2], memory_budget=1, **ALL_OPTIONS, **options,
            **EXTRAS,
        )  # fmt: skip
    output.loss.sum().backward()
    for value in (output.loss, output.z_loss, output.token_accuracy, *(leaf.grad for leaf in leaves)):
        assert torch.equal(value, torch.zeros_like(value))
    assert output.predicted_tokens.tolist() == [-100] * 6


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_softcap_and_logit_scale(device, scale):
    states, weight, target, _ = example()
    check_op(
        "fused_linear_cross_entropy", scale * states, weight, target, backend="triton", tolerance=2 * scale**0.5 * TOLERANCE,
        device=device, softcap=30.0,
    )  # fmt: skip
    exact = weight.double().requires_grad_()
    leaf = weight.to(device).requires_grad_()
    with ops.use_backend("triton"):
        ops.fused_linear_cross_entropy(states.to(device), leaf, target.to(device), logit_scale=0.0625).backward()
    functional.cross_entropy(0.0625 * states.double() @ exact.t(), target).backward()
    torch.testing.assert_close(leaf.grad.cpu().double(), exact.grad, rtol=1e-4, atol=1e-7)  # fp32


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradient_of_the_output_is_applied(device, small_chunks, reduction):
    """Two backwards of one forward, with output gradients of 3 and then 0.5 and 1, are each right."""
    states, weight, target, bias = example()
    leaves = [tensor.clone().to(device).requires_grad_() for tensor in (states, weight, bias)]
    exact = [tensor.double().requires_grad_() for tensor in (states, weight, bias)]
    with ops.use_backend("triton"):
        loss = ops.fused_linear_cross_entropy(
            leaves[0], leaves[1], target.to(device), leaves[2], reduction=reduction, memory_budget=1
        ).sum()
    expected = fused_linear_cross_entropy(exact[0], exact[1], target, exact[2], reduction=reduction).sum()
    for factor in (3.0, 0.5, 1.0):
        ours = torch.autograd.grad(factor * loss, leaves, retain_graph=True)
        for actual, wanted in zip(ours, torch.autograd.grad(factor * expected, exact, retain_graph=True)):
            error = (actual.cpu().double() - wanted).abs().max() / wanted.abs().max()
            assert error <= TOLERANCE


def test_gradients_kept_from_one_backward_are_not_changed_by_the_next(device):
    states, weight, target, _ = example()
    leaf = weight.to(device).requires_grad_()
    with ops.use_backend("triton"):
        loss = ops.fused_linear_cross_entropy(states.to(device), leaf, target.to(device))
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    copy = first.clone()
    (5 * loss).backward()
    assert torch.equal(first, copy)


def test_inputs_are_not_overwritten(device, small_chunks):
    tensors = example()
    copies = [tensor.clone().to(device) for tensor in tensors]
    states, weight, target, bias = (c.requires_grad_() if c.is_floating_point() else c for c in copies)
    with ops.use_backend("triton"):
        (3 * ops.fused_linear_cross_entropy(states, weight, target, bias, memory_budget=1)).backward()
    for copy, tensor in zip(copies, tensors):
        assert torch.equal(copy.detach().cpu(), tensor)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_autocast_of_an_fp32_head(device, backend):
    states, weight, target, bias = example()
    results = []
    for fused in (True, False):
        leaves = [tensor.clone().to(device).requires_grad_() for tensor in (states, weight, bias)]
        with ops.use_backend(backend), torch.autocast(device, torch.bfloat16):
            if fused:
                loss = ops.fused_linear_cross_entropy(leaves[0], leaves[1], target.to(device), leaves[2])
            else:
                loss = functional.cross_entropy(functional.linear(*leaves).float(), target.to(device))
        loss.backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for actual, expected in zip(*results):
        assert actual.dtype == torch.float32
        # the same roundings of the same bf16 products, but for sums that round to a neighbour
        error = (actual - expected).abs().max() / expected.abs().max()
        assert error <= EPSILON[torch.bfloat16]


def test_target_out_of_range(device, monkeypatch):
    states, weight, target, _ = example()
    target[3] = 129
    with pytest.raises(IndexError, match=r"row 3 has target 129.*0 to 128"):
        fused_linear_cross_entropy(states, weight, target)
    arguments = states.to(device), weight.to(device), target.to(device)
    with ops.use_backend("triton"):
        assert ops.fused_linear_cross_entropy(*arguments).isnan()
        monkeypatch.setenv("LIGER_DEBUG", "1")
        with pytest.raises(IndexError, match=r"row 3 has target 129.*0 to 128"):
            ops.fused_linear_cross_entropy(*arguments)


class NewTensors(TorchDispatchMode):
    """Records how many elements each tensor has that an operation allocates."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.sizes.append(tensor.numel())
        return result


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("frozen", ["", "weight", "hidden"])
def test_memory(device, small_chunks, backend, frozen, reduction):
    rows, hidden, vocabulary = 40, 56, 64  # four rows' logits: 256; a row of the hidden states: 56
    states, weight, target, _ = example(rows, hidden, vocabulary)
    states, weight, target = (
        states.to(device).requires_grad_(frozen != "hidden"), weight.to(device).requires_grad_(frozen != "weight"),
        target.to(device),
    )  # fmt: skip
    with NewTensors() as new, ops.use_backend(backend):
        ops.fused_linear_cross_entropy(states, weight, target, memory_budget=1, reduction=reduction).sum().backward()
    heads, all_logits, all_states = vocabulary * hidden, rows * vocabulary, rows * hidden
    assert all_logits not in new.sizes
    assert max(new.sizes) <= (all_states if frozen == "weight" else heads)
    if backend == "triton":
        assert new.sizes.count(heads) == (0 if frozen == "weight" else 1)
        assert new.sizes.count(all_states) == (0 if frozen == "hidden" else 1)
        assert sum(size >= 4 * vocabulary for size in new.sizes if size not in (heads, all_states)) <= 2  # one per pass


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(device, small_chunks, backend, compiler, reduction):
    if backend == "torch" and compiler == "inductor":
        pytest.skip("plain torch: what inductor makes of it is inductor's matter")
    states, weight, target, bias = example(10, 8, 33)
    target = target.to(device)
    results = []
    with ops.use_backend(backend):
        ops.resolve(device)

        def function(h, w, b):
            output = ops.fused_linear_cross_entropy(2 * h, w, target, b, memory_budget=1, reduction=reduction, **EXTRAS)
            return 3 * output.loss.sum(), output.token_accuracy, output.predicted_tokens

        for run in (function, torch.compile(function, fullgraph=True, backend=compiler)):
            leaves = [tensor.clone().to(device).requires_grad_() for tensor in (states, weight, bias)]
            loss, *extras = run(*leaves)
            loss.backward()
            results.append([loss.detach(), *extras, *(leaf.grad for leaf in leaves)])
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager)


def test_compiled_with_dynamic_rows(device, small_chunks):
    with ops.use_backend("triton"):
        ops.resolve(device)
        compiled = torch.compile(
            lambda h, w, t: ops.fused_linear_cross_entropy(h, w, t, memory_budget=1), fullgraph=True, dynamic=True,
            backend="aot_eager",
        )  # fmt: skip
        for rows in (9, 14):
            states, weight, target, _ = (tensor.to(device) for tensor in example(rows, 8, 33))
            gradients = []
            for run in (compiled, ops.fused_linear_cross_entropy):
                leaf = weight.clone().requires_grad_()
                run(states, leaf, target).backward()
                gradients.append(leaf.grad)
            torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)  # fp32; one run may chunk at another row


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_many_chunks_are_as_exact_as_one_product():
    """bf16, 262144 columns, 8192 rows: four chunks."""
    rows, hidden, vocabulary = 8192, 512, 262144
    states = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda")
    head = torch.randn(vocabulary, hidden, device="cuda").div_(hidden**0.5).bfloat16()
    target = torch.randint(0, vocabulary, (rows,), device="cuda")
    exact = torch.zeros(vocabulary, hidden, dtype=torch.float64, device="cuda")
    wide = head.double()
    for start in range(0, rows, 1024):
        part = states[start : start + 1024].double()
        gradient = (part @ wide.t()).softmax(-1)
        gradient[torch.arange(1024, device="cuda"), target[start : start + 1024]] -= 1
        exact.addmm_(gradient.t(), part, alpha=1 / rows)
    del wide, gradient, part

    def error(loss, weight) -> float:
        loss.backward()
        return ((weight.grad.double() - exact).norm() / exact.norm()).item()

    weight = head.clone().requires_grad_()
    one_product = error(functional.cross_entropy(functional.linear(states, weight).float(), target), weight)
    del weight
    # With R = 1 for the rounding of the logits' gradients and 1 for that of the sum, four partial sums are rounded with
    # squared errors of 1/4, 2/4, 3/4 and 1 in place of 1: sqrt((1 + 2.5) / (1 + 1)) = 1.32.
    for dtype, allowed in ((torch.float32, 1.05), (None, 1.35)):
        weight = head.clone().requires_grad_()
        with ops.use_backend("triton"):
            chunked = error(ops.fused_linear_cross_entropy(states, weight, target, accumulation_dtype=dtype), weight)
        assert chunked <= allowed * one_product, f"{dtype}: {chunked:.3g}, one product {one_product:.3g}"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("accumulation_dtype", [None, torch.float32])
@pytest.mark.parametrize("frozen", [False, True])
def test_peak_memory(accumulation_dtype, frozen):
    rows, hidden, vocabulary = 8192, 2048, 128256
    states = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, device="cuda").requires_grad_(not frozen)
    target = torch.randint(0, vocabulary, (rows,), device="cuda")
    for _ in range(2):  # the first run loads kernels and workspaces
        states.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        baseline = torch.cuda.memory_allocated()
        with ops.use_backend("triton"):
            loss = ops.fused_linear_cross_entropy(states, weight, target, accumulation_dtype=accumulation_dtype)
        loss.backward()
    chunk = 4096 * vocabulary * 2
    d_weight = 0 if frozen else weight.numel() * (accumulation_dtype or weight.dtype).itemsize
    d_hidden, small = 2 * states.numel(), 8 * 2**20
    assert torch.cuda.max_memory_allocated() - baseline <= chunk + d_weight + d_hidden + small


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_waits_for_nothing(reduction):
    states, weight, target, bias = (tensor.cuda() for tensor in example())
    leaves = [tensor.requires_grad_() for tensor in (states, weight, bias)]
    divisor = torch.tensor(5, device="cuda") if reduction == "mean" else None
    with ops.use_backend("triton"):
        for mode in ("default", "error"):  # the first run compiles the kernels
            torch.cuda.set_sync_debug_mode(mode)
            try:
                loss = ops.fused_linear_cross_entropy(
                    leaves[0], leaves[1], target, leaves[2], reduction=reduction, divisor=divisor, **ALL_OPTIONS, **EXTRAS
                ).loss
                loss.sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
