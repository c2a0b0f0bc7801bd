import itertools

import pytest
import torch
from checks import EPSILON, check_op
from torch.nn import functional

from liger_models import ops
from liger_models.kernels.cross_entropy import CrossEntropyOutput, cross_entropy

# fp32 throughout. exp2 turns the rounding of its argument, |z|·log2(e) <= 10 here, into a relative error of its value.
TOLERANCE = 32 * EPSILON[torch.float32]
EXTRAS = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}


def example(rows: int = 6, vocabulary: int = 19, seed: int = 0, ignored: tuple[int, ...] = (1,)) -> tuple:
    """Logits and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator)
    target = torch.randint(0, vocabulary, (rows,), generator=generator)
    for row in ignored:
        if row < rows:
            target[row] = -100
    return logits, target


def class_weights(vocabulary: int) -> torch.Tensor:
    return torch.rand(vocabulary, generator=torch.Generator().manual_seed(9)) + 0.1


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_reference_is_torch(reduction, smoothing, weighted):
    logits, target = example()
    weight = class_weights(19).double() if weighted else None
    ours, theirs = logits.double().requires_grad_(), logits.double().requires_grad_()
    loss = cross_entropy(ours, target, weight, label_smoothing=smoothing, reduction=reduction)
    expected = functional.cross_entropy(theirs, target, weight, label_smoothing=smoothing, reduction=reduction)
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)  # fp64
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=1e-13)


def test_reference_z_loss_and_divisor():
    logits, target = example(ignored=(1, 4))
    logits, weight, valid = logits.double(), class_weights(19).double(), target != -100
    square = logits.logsumexp(-1)[valid].square()
    for divisor, count in ((None, valid.sum()), (torch.tensor(7), 7)):
        output = cross_entropy(logits, target, weight, lse_square_scale=0.1, divisor=divisor, return_z_loss=True)
        plain = functional.cross_entropy(logits, target, weight, reduction="mean" if divisor is None else "sum")
        plain = plain if divisor is None else plain / 7
        torch.testing.assert_close(output.z_loss, 0.1 * square.sum() / count)
        torch.testing.assert_close(output.loss, plain + 0.1 * square.sum() / count)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("weighted", "smoothing", "z", "softcap", "scale"),
    [
        *itertools.product([False, True], [0.0, 0.1], [0.0, 1e-2], [None], [1.0]),
        (False, 0.0, 0.0, 2.0, 1.0),
        (False, 0.0, 0.0, None, 0.3),
        (False, 0.0, 0.0, None, -1.5),
        (True, 0.1, 1e-2, 2.0, 1.7),
    ],
)
def test_matches_fp64(device, reduction, weighted, smoothing, z, softcap, scale):
    logits, target = example(vocabulary=129)
    check_op(
        "cross_entropy", logits, target, class_weights(129) if weighted else None, backend="triton", tolerance=TOLERANCE,
        device=device, lse_square_scale=z, label_smoothing=smoothing, reduction=reduction, softcap=softcap, logit_scale=scale,
        **EXTRAS,
    )  # fmt: skip


@pytest.mark.parametrize("divisor", [torch.tensor(11), torch.tensor(3.5), torch.tensor([4])])
@pytest.mark.parametrize("weighted", [False, True])
def test_divisor(device, divisor, weighted):
    logits, target = example()
    check_op(
        "cross_entropy", logits, target, class_weights(19) if weighted else None, backend="triton", tolerance=TOLERANCE,
        device=device, divisor=divisor, lse_square_scale=1e-2, label_smoothing=0.1, **EXTRAS,
    )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocabulary", [1, 3, 129])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_odd_sizes(device, rows, vocabulary, reduction):
    logits, target = example(rows, vocabulary)
    check_op(
        "cross_entropy", logits, target, backend="triton", tolerance=TOLERANCE, device=device, reduction=reduction,
        lse_square_scale=1e-2, **EXTRAS,
    )  # fmt: skip


def test_rows_of_many_blocks(device, monkeypatch):
    from liger_models.kernels.backends.triton import cross_entropy as backend

    monkeypatch.setattr(backend, "MAX_BLOCK", 128)
    logits, target = example(vocabulary=1001)
    for options in ({}, {"label_smoothing": 0.1, "softcap": 3.0, "weight": class_weights(1001)}):
        check_op("cross_entropy", logits, target, backend="triton", tolerance=TOLERANCE, device=device, **options, **EXTRAS)


@pytest.mark.parametrize("vocabulary", [128256, 262144])
def test_long_rows(device, vocabulary):
    logits, target = example(2, vocabulary, ignored=())
    target[0] = vocabulary - 1
    check_op("cross_entropy", logits, target, backend="triton", tolerance=TOLERANCE, device=device, **EXTRAS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device, dtype):
    logits, target = example(vocabulary=129)
    # "sum": float16 gradients stay above its smallest number. The gradient is rounded once: half a spacing.
    check_op(
        "cross_entropy", logits.to(dtype), target, backend="triton", tolerance=EPSILON[dtype], device=device, reduction="sum",
        lse_square_scale=1e-2,
    )  # fmt: skip


def test_non_contiguous(device):
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([[0, 3, 2], [9, -100, 1]])
    layouts = [logits[:, 3:23], logits[:, ::2], logits.view(3, 2, 40).transpose(0, 1)[..., :20], logits[:1, :20].expand(6, 20)]
    for layout in layouts:
        shape = (2, 3) if layout.dim() == 3 else (6,)
        check_op("cross_entropy", layout, target.reshape(shape), backend="triton", tolerance=TOLERANCE, device=device)
    strided_target = torch.stack([target, target], -1)[..., 0]
    check_op("cross_entropy", layouts[2], strided_target, backend="triton", tolerance=TOLERANCE, device=device)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"divisor": torch.tensor(0)}])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rows", [0, 3])
def test_all_rows_ignored(device, backend, options, rows):
    logits = torch.randn(rows, 19, device=device, requires_grad=True)
    with ops.use_backend(backend):
        output = ops.cross_entropy(
            logits, torch.full((rows,), -100, device=device), class_weights(19).to(device), lse_square_scale=0.1,
            label_smoothing=0.1, **options, **EXTRAS,
        )  # fmt: skip
    output.loss.sum().backward()
    for value in (output.loss, output.z_loss, output.token_accuracy, logits.grad):
        assert torch.equal(value, torch.zeros_like(value))
    assert torch.equal(output.predicted_tokens, torch.full_like(output.predicted_tokens, -100))


def test_softcap_of_large_logits(device):
    logits, target = example()
    logits = 100 * logits.sign()
    for extra in (1.0, 1000.0):  # 1000: tanh is 1 to the last bit; its derivative, and so the gradient, is 0 or tiny
        # arguments of exp2 up to 30·log2(e): 43 half spacings
        check_op("cross_entropy", extra * logits, target, backend="triton", tolerance=1e-5, device=device, softcap=30.0)
    capped = logits.clone().requires_grad_()
    functional.cross_entropy(30 * torch.tanh(capped / 30), target).backward()
    ours = logits.to(device).requires_grad_()
    with ops.use_backend("triton"):
        ops.cross_entropy(ours, target.to(device), softcap=30.0).backward()
    torch.testing.assert_close(ours.grad.cpu(), capped.grad, rtol=1e-4, atol=1e-9)  # torch: 1 - tanh² in fp32 cancels


def test_logit_scale_is_in_loss_and_gradient(device):
    logits, target = example()
    scaled = (0.0625 * logits).requires_grad_()
    logits, target = logits.to(device).requires_grad_(), target.to(device)
    with ops.use_backend("triton"):
        loss = ops.cross_entropy(logits, target, logit_scale=0.0625)
    expected = functional.cross_entropy(scaled, target.cpu())
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected)
    torch.testing.assert_close(logits.grad.cpu(), 0.0625 * scaled.grad)


def test_small_call_without_gradients(device):
    logits, target = example(4, 3, ignored=())
    with ops.use_backend("triton"), torch.no_grad():
        loss = ops.cross_entropy(logits.to(device), target.to(device))
    torch.testing.assert_close(loss.cpu(), functional.cross_entropy(logits, target))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_token_accuracy_and_predicted_tokens(device, backend):
    logits = torch.zeros(5, 300, device=device)
    logits[0, 7] = logits[0, 290] = 2.0  # the first of equals is the prediction
    logits[1, 4] = logits[2, 4] = logits[3, 5] = 1.0  # row 4: all equal
    target = torch.tensor([7, 4, -100, 4, 0], device=device)
    with ops.use_backend(backend):
        output = ops.cross_entropy(logits, target, return_token_accuracy=True, return_predicted_tokens=True)
        per_row = ops.cross_entropy(logits, target, reduction="none", return_token_accuracy=True)
    assert output.predicted_tokens.tolist() == [7, 4, -100, 5, 0]
    torch.testing.assert_close(output.token_accuracy.item(), 0.75)
    assert per_row.token_accuracy.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert output.z_loss is None


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_result(device, backend):
    logits, target = example()
    logits, target = logits.to(device).requires_grad_(), target.to(device)
    with ops.use_backend(backend):
        assert isinstance(ops.cross_entropy(logits, target), torch.Tensor)
        output = ops.cross_entropy(logits, target, lse_square_scale=0.1, **EXTRAS)
    assert isinstance(output, CrossEntropyOutput)
    assert [tensor.requires_grad for tensor in output] == [True, False, False, False]
    assert output.loss.dtype == output.token_accuracy.dtype == torch.float32
    assert output.predicted_tokens.dtype == torch.int64


def test_expanded_gradient_and_second_backward(device):
    logits, target = example()
    leaf = logits.to(device).requires_grad_()
    with ops.use_backend("triton"):
        loss = ops.cross_entropy(leaf, target.to(device), reduction="none")
    loss.sum().backward(retain_graph=True)  # its gradient has a stride of 0
    once = leaf.grad.clone()
    loss.sum().backward()
    expected = logits.detach().clone().requires_grad_()
    functional.cross_entropy(expected, target, reduction="sum").backward()
    torch.testing.assert_close(once.cpu(), expected.grad)
    torch.testing.assert_close(leaf.grad, 2 * once)


def test_logits_are_not_overwritten(device):
    logits, target = example()
    leaf = logits.clone().to(device).requires_grad_()
    with ops.use_backend("triton"):
        ops.cross_entropy(leaf, target.to(device)).backward()
    assert torch.equal(leaf.detach().cpu(), logits)


def test_masked_columns_and_ignore_index_that_is_a_column(device):
    logits, target = example(ignored=())
    logits[:, 5:9] = float("-inf")
    target[:] = torch.tensor([0, 2, 12, 0, 18, 1])
    check_op("cross_entropy", logits, target, backend="triton", tolerance=TOLERANCE, device=device, ignore_index=0, **EXTRAS)


@pytest.mark.parametrize("wrong", [19, -1, 2**40])
def test_target_out_of_range(device, monkeypatch, wrong):
    logits, target = example()
    target[3] = wrong
    message = rf"row 3 has target {wrong}.*0 to 18"
    with pytest.raises(IndexError, match=message):
        cross_entropy(logits, target)
    logits, target = logits.to(device).requires_grad_(), target.to(device)
    monkeypatch.setenv("LIGER_DEBUG", "1")
    with ops.use_backend("triton"), pytest.raises(IndexError, match=message):
        ops.cross_entropy(logits, target)
    monkeypatch.delenv("LIGER_DEBUG")
    with ops.use_backend("triton"):
        loss = ops.cross_entropy(logits, target, class_weights(19).to(device), reduction="none")
    loss.sum().backward()
    others = [0, 1, 2, 4, 5]
    assert loss[3].isnan()
    assert loss[others].isfinite().all()
    assert logits.grad[3].isnan().all()
    assert logits.grad[others].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "avg"}, "reduction 'avg'"),
        ({"divisor": torch.tensor(3), "reduction": "sum"}, "reduction='mean'"),
        ({"divisor": torch.ones(6)}, "0-d"),
        ({"label_smoothing": 1.5}, "label_smoothing 1.5"),
        ({"softcap": 0.0}, "softcap 0.0"),
        ({"weight": torch.ones(7)}, r"\(19,\)"),
        ({"target": torch.zeros(5, dtype=torch.int64)}, "must be equal"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_arguments_that_do_not_fit(device, backend, options, message):
    logits, target = example()
    with ops.use_backend(backend), pytest.raises(ValueError, match=message):
        ops.cross_entropy(**{"logits": logits.to(device), "target": target.to(device), **options})


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(device, backend, reduction):
    logits, target = example()
    target = target.to(device)
    results = []
    with ops.use_backend(backend):
        ops.resolve(device)

        def function(x):
            output = ops.cross_entropy(x, target, softcap=4.0, reduction=reduction, **EXTRAS)
            return 3 * output.loss.sum(), output.token_accuracy

        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            leaf = logits.to(device).requires_grad_()
            loss, accuracy = run(leaf)
            loss.backward()
            results.append((loss.detach(), accuracy, leaf.grad))
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_row_offsets_beyond_32_bits():
    rows, vocabulary = 16800, 128256  # the last rows start beyond 2**31 elements
    logits = torch.randn(rows, vocabulary, dtype=torch.bfloat16, device="cuda").requires_grad_()
    target = torch.randint(0, vocabulary, (rows,), device="cuda")
    assert (rows - 4) * vocabulary > 2**31
    with ops.use_backend("triton"):
        loss = ops.cross_entropy(logits, target, reduction="none")
    loss.sum().backward()
    last = logits.detach()[-4:].double().requires_grad_()
    expected = functional.cross_entropy(last, target[-4:], reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(loss[-4:].double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(logits.grad[-4:].double(), last.grad, rtol=EPSILON[torch.bfloat16], atol=1e-9)
