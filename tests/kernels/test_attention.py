import itertools

import pytest
import torch
from checks import EPSILON, check_op, gradients, to_device

from liger_models import ops
from liger_models.kernels.attention import attention
from liger_models.kernels.registry import contracts

# Scores of up to 64 products, softmax and sums over up to 50 keys, in fp32; an error of a score is one of its weight. The
# gradients pass through a second such sum.
FP32 = 64 * EPSILON[torch.float32]

# (queries, keys, warps, stages), smaller than the tests' sequences: blocks that are skipped, full and masked, before and
# behind the full ones
SMALL_TILES = {"forward": (16, 16, 4, 1), "query_gradient": (32, 16, 4, 1), "key_value_gradient": (16, 32, 4, 1)}


@pytest.fixture
def implementation(device):
    """The module under test. Imported once `device` has decided whether its kernels are interpreted."""
    from liger_models.kernels.backends.triton import attention

    return attention


@pytest.fixture
def small_tiles(implementation, monkeypatch):
    monkeypatch.setattr(implementation, "tile", lambda kernel, *_: implementation.Tile(*SMALL_TILES[kernel]))


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch, heads, key_value_heads, queries, keys, head_dim, dtype=torch.float32):
    """As the models have them: transposed views of [batch, sequence, heads, head_dim]."""
    sizes = ((heads, queries), (key_value_heads, keys), (key_value_heads, keys))
    return tuple(
        random(batch, length, count, head_dim, seed=seed, dtype=dtype).transpose(1, 2)
        for seed, (count, length) in enumerate(sizes)
    )


def bounds(first, last):
    return torch.as_tensor(first).to(torch.int32), torch.as_tensor(last).to(torch.int32)


def causal(queries, keys=None, window=None):
    """The queries are the last positions of a sequence of `keys`."""
    last = torch.arange(queries)[None] + (queries if keys is None else keys) - queries
    return bounds(torch.zeros_like(last) if window is None else last - window + 1, last)


def packed(*lengths):
    start = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    return bounds(start[None], torch.arange(sum(lengths))[None])


def padded(length, left=(0, 0), right=(0, 0)):
    """Causal, with so many padded keys on either side of each sequence. Padded queries on the left see nothing."""
    position = torch.arange(length).expand(len(left), -1)
    first = torch.tensor(left)[:, None].expand(-1, length)
    return bounds(first, torch.minimum(position, length - 1 - torch.tensor(right[: len(left)])[:, None]))


def unordered(queries, keys):
    generator = torch.Generator().manual_seed(5)
    first, last = (torch.randint(-20, keys + 20, (2, queries), generator=generator) for _ in range(2))
    return bounds(first, last)


INTERVALS = {
    "causal": causal(50),
    "window of 5": causal(50, window=5),
    "window of 40": causal(50, window=40),
    "window of 1": causal(50, window=1),
    "packed": packed(3, 20, 1, 26),
    "left padding": padded(50, left=(0, 37)),
    "right padding": padded(50, right=(35, 0)),
    "both paddings": padded(50, left=(0, 20), right=(17, 23)),
    "all keys": bounds(torch.zeros(1, 50), torch.full((1, 50), 49)),
    "beyond the keys": bounds(torch.full((1, 50), -(2**31)), torch.full((1, 50), 2**31 - 1)),
    "unordered": unordered(50, 50),
    # For the first keys, blocks of queries that see all of them lie on both sides of one that does not.
    "alternating": bounds(torch.zeros(1, 50), torch.tensor([49] * 16 + [5] * 16 + [49] * 18)[None]),
}


@pytest.mark.parametrize("name", INTERVALS)
def test_intervals(device, small_tiles, name):
    first, last = INTERVALS[name]
    # with one key and no sink every weight is 1 and the gradients of q and k are 0
    sinks = random(2, seed=7) if name in ("causal", "window of 5", "window of 1", "both paddings") else None
    check_op(
        "attention", *qkv(first.shape[0], 2, 1, 50, 50, 16), first, last, None, sinks, 0.25,
        backend="triton", tolerance=FP32, device=device,
    )  # fmt: skip


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_key_mask_with_holes(device, small_tiles, softcap, has_sinks, dtype):
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[1, :20] = False  # its first queries see no key
    sinks = random(2, seed=7) if has_sinks else None
    check_op(
        "attention", *qkv(2, 2, 1, 40, 40, 16), *causal(40), mask.to(dtype), sinks, 0.25, softcap,
        backend="triton", tolerance=FP32, device=device,
    )  # fmt: skip


@pytest.mark.parametrize("softcap", [0.05, 1.0, 50.0])
def test_soft_cap(device, small_tiles, softcap):
    q, k, v = qkv(1, 2, 1, 40, 40, 16)
    scores = (q * 3) @ k.transpose(2, 3) / softcap
    assert softcap > 1 or (scores.abs() > 9).any()  # tanh is 1 in fp32
    # The tanh is right to two spacings of 1 whatever its size, and the scores' errors are those times the cap. Where nearly
    # all slopes are zero, gradients are small, and the error of a slope near one counts twice.
    tolerance = (2 if softcap < 1 else 1) * FP32 + 4 * softcap * EPSILON[torch.float32]
    check_op(
        "attention", q * 3, k, v, *causal(40, window=20), None, random(2), 1.0, softcap,
        backend="triton", tolerance=tolerance, device=device,
    )  # fmt: skip


@pytest.mark.parametrize("size", [-200.0, -5.0, 5.0, 200.0])
def test_sinks_small_and_large(device, small_tiles, size):
    sinks = torch.tensor([size, size / 2, 0.0])
    check_op(
        "attention", *qkv(2, 3, 1, 20, 20, 16), *causal(20, window=10), None, sinks, 0.25,
        backend="triton", tolerance=FP32, device=device,
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "key_value_heads"), [(1, 1), (3, 3), (4, 2), (6, 2), (8, 1)])
def test_grouped_heads(device, small_tiles, heads, key_value_heads):
    check_op(
        "attention", *qkv(1, heads, key_value_heads, 40, 40, 16), *causal(40, window=17), None, random(heads), 0.25,
        backend="triton", tolerance=FP32, device=device,
    )  # fmt: skip


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 50), (3, 50), (20, 37), (50, 20)])
@pytest.mark.parametrize("tiles", ["small", "default"])
def test_cached_keys(device, queries, keys, tiles, request):
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    check_op(
        "attention", *qkv(2, 4, 2, queries, keys, 16), *causal(queries, keys), None, random(4), 0.25,
        backend="triton", tolerance=FP32, device=device,
    )  # fmt: skip


@pytest.mark.parametrize("head_dim", [1, 16, 24, 64, 129])
def test_head_dims(device, head_dim):
    # from 129 on the gradients of keys and values are made one after the other
    check_op(
        "attention", *qkv(1, 2, 1, 40, 40, head_dim), *causal(40), None, random(2), head_dim**-0.5, 20.0,
        backend="triton", tolerance=2 * FP32, device=device,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(0, 2, 1, 5, 5, 8), (2, 2, 1, 0, 5, 8), (2, 2, 1, 5, 0, 8), (0, 2, 1, 0, 0, 8)])
def test_empty(device, shape):
    first, last = causal(shape[3], shape[4])
    check_op("attention", *qkv(*shape), first, last, None, random(2), backend="triton", tolerance=FP32, device=device)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_queries_that_see_nothing(device, small_tiles, backend, has_sinks):
    first, last = bounds(torch.zeros(1, 40), torch.full((1, 40), -1))
    last[:, 20:] = 39
    arguments = [*qkv(1, 2, 1, 40, 40, 16), first, last, None, random(2) if has_sinks else None, 0.25]
    leaves = [
        to_device(a, device).requires_grad_(i in (0, 1, 2, 6)) if a is not None else None for i, a in enumerate(arguments[:7])
    ]
    with ops.use_backend(backend):
        output = ops.attention(*leaves, 0.25)
    output.backward(torch.ones_like(output))
    assert not output[:, :20].any()
    assert output[:, 20:].all()
    assert not leaves[0].grad[:, :, :20].any()
    assert leaves[0].grad[:, :, 20:].any()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves if leaf is not None and leaf.requires_grad)


LAYOUTS = {
    "heads first": lambda t: t.contiguous(),
    "head_dim outermost": lambda t: t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "slices of a packed projection": lambda t: (
        torch.cat((t, t, t), 1).transpose(1, 2).contiguous().transpose(1, 2)[:, : t.shape[1]]
    ),
    "every second": lambda t: torch.stack((t, t), 3).flatten(3)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, small_tiles, layout):
    tensors = [LAYOUTS[layout](t) for t in qkv(2, 4, 2, 20, 20, 16)]
    first, last = (torch.stack((bound, bound), -1)[..., 0] for bound in padded(20, left=(3, 0)))
    mask = torch.ones(20, 2, dtype=torch.bool).t()
    mask[0, 5] = False
    check_op("attention", *tensors, first, last, mask, random(4), backend="triton", tolerance=FP32, device=device)


def test_output_is_contiguous_and_gradients_follow_the_layout_of_tokens(device):
    tensors = [to_device(t, device).requires_grad_() for t in qkv(2, 4, 2, 5, 5, 8)]
    for backend in ("torch", "triton"):
        with ops.use_backend(backend):
            output = ops.attention(*tensors, *(b.to(device) for b in causal(5)))
        assert output.is_contiguous()
    for gradient in torch.autograd.grad(output.sum(), tensors):
        assert gradient.transpose(1, 2).is_contiguous()


def test_gradient_of_any_strides(device, small_tiles):
    tensors, weight = qkv(2, 2, 1, 20, 20, 16), random(2, 2, 16, 20, seed=9)  # heads before queries: not the output's layout

    def summed(function):
        return lambda *arguments: (function(*arguments) * weight.to(arguments[0]).permute(0, 3, 1, 2)).sum()

    names, wanted = ("q", "k", "v", "first_key", "last_key"), ("q", "k", "v")
    expected = gradients(summed(attention), [*(t.double() for t in tensors), *causal(20)], names, wanted)
    with ops.use_backend("triton"):
        actual = gradients(summed(ops.attention), [to_device(t, device) for t in (*tensors, *causal(20))], names, wanted)
    for name, value in actual.items():
        torch.testing.assert_close(value.cpu().double(), expected[name], rtol=1e-4, atol=1e-4)


def test_blocks_that_no_query_sees_are_not_read(device, small_tiles):
    # 32 tokens of padding, which are whole blocks of every kernel: even NaN in them reaches nothing.
    dirty, (first, last) = qkv(1, 2, 1, 64, 64, 16), padded(64, left=(32,))
    for tensor in dirty:
        tensor[:, :, :32] = float("nan")
    dirty = [to_device(t, device).requires_grad_() for t in dirty]
    clean = [t.detach()[:, :, 32:].requires_grad_() for t in dirty]
    with ops.use_backend("triton"):
        output = ops.attention(*dirty, first.to(device), last.to(device))
        expected = ops.attention(*clean, *(b.to(device) for b in causal(32)))
    assert torch.equal(output[:, 32:], expected)
    gradients_of_dirty = torch.autograd.grad(output.sum(), dirty)
    for gradient, of_clean in zip(gradients_of_dirty, torch.autograd.grad(expected.sum(), clean)):
        assert torch.equal(gradient[:, :, 32:], of_clean)
        assert not gradient[:, :, :32].any()


def spy_on_empty(monkeypatch) -> list[tuple]:
    allocated, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: allocated.append(size) or empty(*size, **options))
    return allocated


# A number per query is kept in rows of a multiple of 16; bounds of the only block of queries
DELTA, INTERVALS_OF_QUERIES, BOUNDS, PARTIAL = (2, 4, 16), (2, 2, 16), (2, 1, 4), (2, 1, 4)
DQ, DKV = (2, 5, 4, 8), (2, 5, 2, 8)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("q", [DELTA, DQ]),
        ("k", [DELTA, INTERVALS_OF_QUERIES, BOUNDS, DKV]),
        ("v", [INTERVALS_OF_QUERIES, BOUNDS, DKV]),
        ("sinks", [DELTA, PARTIAL]),
        ("qkv", [DELTA, INTERVALS_OF_QUERIES, BOUNDS, DQ, DKV, DKV]),
    ],
)
def test_frozen_inputs_allocate_nothing(device, wanted, expected, monkeypatch):
    names = [wanted] if wanted == "sinks" else list(wanted)
    tensors = {**dict(zip("qkv", qkv(2, 4, 2, 5, 5, 8))), "sinks": random(4)}
    tensors = {name: to_device(t, device).requires_grad_(name in names) for name, t in tensors.items()}
    with ops.use_backend("triton"):
        output = ops.attention(**tensors, **dict(zip(("first_key", "last_key"), (b.to(device) for b in causal(5)))))
    allocated = spy_on_empty(monkeypatch)
    output.backward(torch.ones_like(output))
    assert allocated == expected


def test_inference_keeps_and_allocates_the_output_only(device, monkeypatch):
    tensors = [to_device(t, device) for t in (*qkv(2, 4, 2, 5, 5, 8), *causal(5))]
    allocated = spy_on_empty(monkeypatch)
    with ops.use_backend("triton"):
        ops.attention(*tensors)
    assert allocated == [(2, 5, 4, 8)]


def test_what_backward_keeps(device):
    mask, sinks = torch.ones(2, 5, dtype=torch.bool), random(4)
    arguments = [to_device(t, device) for t in (*qkv(2, 4, 2, 5, 5, 8), *causal(5), mask, sinks)]
    arguments[0].requires_grad_()
    with ops.use_backend("triton"):
        output = ops.attention(*arguments)
    *kept, log2_sum = output.grad_fn.saved_tensors
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in (*arguments, output)]
    assert log2_sum.shape == (2, 4, 16)  # rows of 5 queries, rounded up


def test_backward_without_a_gradient(device, implementation):
    arguments = [to_device(t, device) for t in (*qkv(1, 1, 1, 3, 3, 8), *causal(3))]
    needs = contracts()["attention"].needs_type(True, True, True, False)
    kept = dict(zip(("q", "k", "v", "first_key", "last_key"), arguments))
    output, (log2_sum,) = implementation.forward(needs, *arguments, None, None, 1.0, None)
    none = implementation.backward(
        needs, (None,), **kept, key_mask=None, sinks=None, scaling=1.0, softcap=None, output=output, log2_sum=log2_sum
    )
    assert none == (None, None, None, None)


def test_deterministic(device, small_tiles):
    arguments = [to_device(t, device) for t in (*qkv(1, 4, 1, 20, 20, 16), *causal(20), torch.ones(1, 20).bool(), random(4))]
    names = ("q", "k", "v", "first_key", "last_key", "key_mask", "sinks")
    with ops.use_backend("triton"):
        once, again = (gradients(ops.attention, arguments, names, ("q", "k", "v", "sinks")) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_autocast(device):
    # q in fp32 (a norm of its own), k and v in bf16: one dtype under autocast, as in scaled_dot_product_attention
    q, k, v = (to_device(t, device) for t in qkv(1, 2, 1, 5, 5, 16))
    q.requires_grad_()
    first, last = (b.to(device) for b in causal(5))
    with ops.use_backend("torch"), torch.autocast(device, torch.bfloat16):
        output = ops.attention(q, k.bfloat16(), v.bfloat16(), first, last)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert q.grad.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# The block sizes


def test_tiles_shrink_until_they_fit(implementation):
    for kernel, head_block, shared in itertools.product(
        implementation.TILES, (16, 32, 64, 128, 256), (65536, 102400, 167936, 233472)
    ):
        chosen = implementation.tile(kernel, head_block, 2, shared)
        assert implementation._shared_bytes(kernel, chosen, head_block, 2) <= shared
        assert min(chosen.queries, chosen.keys) >= 16  # what a matrix product takes
        if shared == 233472:
            assert chosen == implementation.TILES[kernel][max(64, head_block)]


# ---------------------------------------------------------------------------------------------------------------------
# The reference itself


@pytest.mark.parametrize("softcap", [None, 1e9])
def test_reference_equals_torch(softcap):
    q, k, v = (t.double().requires_grad_() for t in qkv(2, 4, 2, 9, 9, 16))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)
    actual = attention(q, k, v, *causal(9), scaling=0.3, softcap=softcap)
    check_equal(actual, expected.transpose(1, 2), (q, k, v))


def with_sink_column(q, k, v, visible, sinks, scaling):
    """Sinks as a column of scores that is dropped after the softmax."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT * scaling).masked_fill(~visible, float("-inf"))
    column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return (torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)


def test_reference_equals_a_dropped_column_of_sinks():
    q, k, v = (t.double().requires_grad_() for t in qkv(2, 4, 2, 9, 9, 16))
    sinks = random(4).double().requires_grad_()
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) > 0.3
    key, query = torch.arange(9), torch.arange(9)[:, None]
    visible = (key <= query) & (key > query - 4) & mask[:, None, None]
    expected = with_sink_column(q, k, v, visible, sinks, 0.3)
    actual = attention(q, k, v, *causal(9, window=4), mask, sinks, 0.3)
    check_equal(actual, expected, (q, k, v, sinks))


def check_equal(actual, expected, leaves):
    """Outputs and gradients are equal but for the order of sums in fp64."""
    weight = random(*expected.shape, seed=4).double()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    pairs = zip(torch.autograd.grad((actual * weight).sum(), leaves), torch.autograd.grad((expected * weight).sum(), leaves))
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def misfits():
    q, k, v = qkv(2, 4, 2, 3, 5, 8)
    first, last = causal(3, 5)
    mask, sinks = torch.ones(2, 5, dtype=torch.bool), random(4)
    return {
        r"q has shape \(4, 3, 8\)": (q[0], k, v, first, last),
        r"k and v alike": (q, k, v[:, :, :4], first, last),
        r"multiple of that of key-value heads": (q[:, :3], k, v, first, last),
        r"agree in batch": (q, k[:1], v[:1], first, last),
        r"cast them to one dtype": (q.bfloat16(), k, v, first, last),
        r"first_key is torch.int32 \(1, 2\).*\[2 or 1, 3\]": (q, k, v, first[:, :2], last),
        r"last_key is torch.int64": (q, k, v, first, last.long()),
        r"expand one": (q, k, v, first.expand(2, -1), last),
        r"key_mask is torch.bool \(2, 4\).*\[2, 5\]": (q, k, v, first, last, mask[:, :4]),
        r"key_mask is torch.float32": (q, k, v, first, last, mask.float()),
        r"sinks is torch.float32 \(2,\).*one per query head": (q, k, v, first, last, None, sinks[:2]),
        r"scaling is 0": (q, k, v, first, last, None, None, 0.0),
        r"softcap is -1": (q, k, v, first, last, None, None, 1.0, -1.0),
    }


@pytest.mark.parametrize("message", misfits())
def test_misfits_are_errors(device, message):
    arguments = misfits()[message]
    with pytest.raises(ValueError, match=f"attention: .*{message}"):
        attention(*arguments)
    placed = [to_device(a, device) if isinstance(a, torch.Tensor) else a for a in arguments]
    with ops.use_backend("triton"), pytest.raises(ops.KernelUnavailableError, match=message):
        ops.attention(*placed)


def test_large_heads_are_refused(device):
    tensors = [to_device(t, device) for t in (*qkv(1, 1, 1, 2, 2, 257), *causal(2))]
    with ops.use_backend("triton"), pytest.raises(ops.KernelUnavailableError, match="head_dim 257 above 256"):
        ops.attention(*tensors)


# ---------------------------------------------------------------------------------------------------------------------
# Half precision and real block sizes, on a GPU: the interpreter multiplies bf16 wrongly


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("form", ["causal", "window", "packed", "mask", "softcap"])
def test_half_precision(cuda, dtype, head_dim, form):
    length = 700
    intervals = {"window": causal(length, window=128), "packed": packed(300, 1, 399)}.get(form, causal(length))
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) > 0.2 if form == "mask" else None
    # Weights, their gradients and results are rounded once each, inputs are exact; sums in fp32. Relative to the largest.
    check_op(
        "attention", *qkv(2, 8, 2, length, length, head_dim, dtype), *intervals, mask, random(8), head_dim**-0.5,
        2.0 if form == "softcap" else None, backend="triton", tolerance=2 * EPSILON[dtype], device="cuda",
    )  # fmt: skip


@pytest.mark.gpu
def test_offsets_beyond_31_bits(cuda):
    # q, its gradient and the output have 2**31 elements and some: batch 2, of which the last head counts
    heads, length = 8192, 1040
    q = torch.zeros(2, length, heads, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    q[1, -1] = random(length, 128, dtype=torch.bfloat16).cuda()
    k, v = (random(2, 1, length, 128, seed=seed, dtype=torch.bfloat16).cuda() for seed in (1, 2))
    first, last = (b.cuda() for b in causal(length))
    with ops.use_backend("triton"), torch.no_grad():
        output = ops.attention(q, k, v, first, last, scaling=0.1)
        expected = ops.attention(q[1:, -1:], k[1:], v[1:], first, last, scaling=0.1)
    assert q.numel() > 2**31
    assert torch.equal(output[1:, :, -1:], expected)
