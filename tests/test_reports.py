"""Public bug reports against peers and the stock library, as rows O36 to O43 and O62 of the list that this project keeps, where
no other test shows them."""

import importlib

import pytest
import torch
from checks import EPSILON
from models.comparison import FP32, assert_equal, error, inputs_of, results, stock_names
from models.families import CASES, GEMMA, GEMMA2, GEMMA3, GLM, GLM4, MAIN, MAIN_ATTENTIONS, Case
from torch.nn.functional import cross_entropy, gelu

from liger_models import ops
from liger_models.decoder import LigerRotaryEmbedding
from liger_models.layers.norm import LigerRMSNorm


@pytest.mark.parametrize("side", ["left", "right", "unmasked"])
@pytest.mark.parametrize("case, attention", MAIN_ATTENTIONS, ids=str)
def test_o36_what_is_masked_does_not_matter(case: Case, attention: str, side: str, build):
    """Padding tokens, and last tokens whose labels are ignored, changed at random: the same loss and gradients, to the bit (in
    mixtures to rounding)."""
    model = build("native", case, attn_implementation=attention).train()
    names, inputs = stock_names(build("stock", case)), inputs_of(model)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, slice(0, 5) if side == "left" else slice(8, None)] = 0
    mask[1, slice(0, 2) if side == "left" else slice(11, None)] = 0
    labels = inputs["labels"].masked_fill(mask == 0, -100)
    labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)  # what a padding token would predict
    given = {"labels": labels, **({} if side == "unmasked" else {"attention_mask": mask})}

    def with_noise(where: torch.Tensor, seed: int) -> dict:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(3, model.config.vocab_size, mask.shape, generator=generator)
        tokens = torch.where(where, noise, inputs["input_ids"])
        return results(model, names, input_ids=tokens, **given)

    first, second, other = with_noise(mask == 0, 0), with_noise(mask == 0, 1), with_noise(mask == 1, 0)
    # An expert's products sum in another order where other tokens, padding too, come to it.
    assert_equal(second, first, tolerance=FP32 if case.family.experts else 0.0)
    assert error(other["loss"], first["loss"]) > 1e-3


_GEMMA_NORMS = [(GEMMA, "GemmaRMSNorm"), (GEMMA2, "Gemma2RMSNorm"), (GEMMA3, "Gemma3RMSNorm")]


def _gemma_norms(family, name: str, width: int) -> tuple[torch.nn.Module, LigerRMSNorm]:
    torch.manual_seed(0)
    stock = getattr(importlib.import_module(family.modelling), name)(width, eps=1e-6).bfloat16()
    native = LigerRMSNorm(width, eps=1e-6, offset=1.0, scale_in_fp32=True).bfloat16()
    with torch.no_grad():
        stock.weight.normal_()
        native.weight.copy_(stock.weight)
    return stock, native


# The square of 1e30 is beyond fp32, and that of 1e-30 below it.
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 300.0, 1e18, 1e30])
@pytest.mark.parametrize("family, name", _GEMMA_NORMS)
def test_o37_gemma_norm_is_bit_equal_in_bf16(family, name: str, scale: float):
    stock, native = _gemma_norms(family, name, 96)
    x = (torch.randn(64, 96) * scale).bfloat16()
    assert torch.equal(native(x), stock(x))
    composed, fused = native(x + x), ops.fused_add_rms_norm(x, x, native.weight, 1e-6, 1.0, True)[0]
    assert torch.equal(composed, fused)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0, 1e15])
@pytest.mark.parametrize("family, name", _GEMMA_NORMS)
def test_o37_gemma_norm_in_triton(family, name: str, scale: float, device, poisoned_empty, resolved_anew):
    """The sum of squares runs in another order: of fp32 results that differ by some 2⁻²² one in 2¹² rounds to another bf16.

    Llama's order of rounding, or 1 + w in bf16, is off in more than one of ten.
    """
    stock, native = _gemma_norms(family, name, 96)
    x = (torch.randn(64, 96) * scale).bfloat16()
    right = stock(x)
    with ops.use_backend("triton"):
        found = native.to(device)(x.to(device)).cpu()
    assert error(found, right) <= 2.0**-8
    assert (found != right).double().mean() < 1e-3
    weight = native.weight.cpu()
    normalised = ops.rms_norm(x, None, 1e-6)
    for wrong in ((1.0 + weight) * normalised, ops.rms_norm(x, (1.0 + weight), 1e-6, 0.0, True)):
        assert (wrong != right).double().mean() > 0.1


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_o38_soft_cap_inside_the_fused_loss(scale: float, backend: str, device, poisoned_empty, resolved_anew):
    """Logits around ±100 against a cap of 30."""
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(24, 16), torch.randn(50, 16) * scale / 4, torch.randint(50, (24,))
    x, w = (t.clone().to(device).requires_grad_() for t in (hidden, weight))
    with ops.use_backend(backend):
        loss = ops.fused_linear_cross_entropy(x, w, targets.to(device), softcap=30.0)
        loss.backward()
    found = {"loss": loss.detach().cpu(), "hidden": x.grad.cpu(), "weight": w.grad.cpu()}
    x, w = (t.double().requires_grad_() for t in (hidden, weight))
    logits = x @ w.T
    assert scale == 1.0 or logits.abs().max() > 90
    loss = cross_entropy(30.0 * torch.tanh(logits / 30.0), targets)
    loss.backward()
    # Logits of 16 products of size 100 are right to 16 · 2⁻²⁴ · 100, and so are the losses' gradients relative to one.
    tolerance = 1600 * 2.0**-24 if scale > 1 else FP32
    assert_equal(found, {"loss": loss.detach(), "hidden": x.grad, "weight": w.grad}, tolerance)
    assert error(cross_entropy(logits, targets), loss) > 0.01 or scale == 1.0


@pytest.mark.parametrize("family", [GEMMA2, GEMMA3], ids=lambda family: family.name)
def test_o38_soft_cap_of_a_model(family, pair):
    """Logits around ±100 before the cap, in training, where they are never formed, and in evaluation."""
    case = next(case for case in MAIN if case.family is family)
    stock, native = pair(case, saved_with={"final_logit_softcapping": 30.0})
    for model in (stock, native):
        with torch.no_grad():
            model.model.norm.weight.fill_(11.0)  # 12 times a normalised row, against rows of a head of length 1.5 √(1 to 3)
    names, inputs = stock_names(stock), inputs_of(stock)
    largest = results(stock, **inputs)["logits"].abs().max()
    assert 25 < largest < 30
    # The largest logits before the cap are eight times those of other tests, and so are their roundings.
    assert_equal(results(native, names, **inputs), results(stock, names, **inputs), 8 * FP32)
    assert_equal(results(native.train(), names, **inputs), results(stock.train(), names, **inputs), 8 * FP32, ("logits",))


@pytest.mark.parametrize("family", [GEMMA, GEMMA2, GEMMA3], ids=lambda family: family.name)
def test_o38_the_configuration_decides_between_erf_and_tanh(family, pair):
    """Gemma 1's first configurations said "gelu" and meant tanh: its stock configuration reads it so, and nobody else's."""
    case = next(case for case in MAIN if case.family is family)
    option = "hidden_act" if family is GEMMA else "hidden_activation"
    logits = []
    for activation in ("gelu", "gelu_pytorch_tanh"):
        stock, native = pair(case, saved_with={option: activation})
        inputs = inputs_of(stock)
        logits.append(results(native, **inputs)["logits"])
        assert error(logits[-1], results(stock, **inputs)["logits"]) <= FP32
    assert torch.equal(*logits) if family is GEMMA else error(*logits) > 10 * FP32


def test_o38_gelu_is_the_exact_one_where_the_configuration_says_so(pair):
    case = next(case for case in _cases(GEMMA2) if case.name == "gelu")
    _, native = pair(case)
    x = torch.randn(4, native.config.hidden_size)
    mlp = native.model.layers[0].mlp
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    assert error(mlp(x), mlp.down_proj(gelu(gate) * up)) <= FP32
    assert error(mlp(x), mlp.down_proj(gelu(gate, approximate="tanh") * up)) > 1e-5


def test_o39_a_weight_of_zero_in_gemma_is_a_weight_of_one_elsewhere():
    x = torch.randn(8, 32).bfloat16()
    gemma = LigerRMSNorm(32, eps=1e-6, offset=1.0, scale_in_fp32=True).bfloat16()
    llama = LigerRMSNorm(32, eps=1e-6).bfloat16()
    assert not gemma.weight.any() and bool((llama.weight == 1).all())
    assert torch.equal(gemma(x), llama(x))


@pytest.mark.parametrize("family", [GEMMA, GEMMA2, GEMMA3], ids=lambda family: family.name)
def test_o39_a_checkpoint_with_norm_weights_of_zero(family, pair):
    """As the stock class reads it, and as norms with weights of one that nothing is added to. Other weights are others'."""
    stock, native = pair(next(case for case in MAIN if case.family is family))
    inputs = inputs_of(stock)
    before = results(native, **inputs)["logits"]
    for model in (stock, native):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.zero_()
    logits = results(native, **inputs)["logits"]
    assert error(logits, results(stock, **inputs)["logits"]) <= FP32
    assert error(logits, before) > 0.1
    for name, norm in [(name, module) for name, module in native.named_modules() if isinstance(module, LigerRMSNorm)]:
        plain = LigerRMSNorm(norm.weight.shape[0], eps=norm.eps)
        assert bool((plain.weight == 1).all())
        native.set_submodule(name, plain)
    assert error(results(native, **inputs)["logits"], logits) <= FP32


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("family", [GLM, GLM4], ids=lambda family: family.name)
def test_o41_partial_rotation_is_finite_and_equal(family, backend: str, pair, device, poisoned_empty, resolved_anew):
    """With a quarter of a head rotated, memory that nothing was written to would show as NaN."""
    case = next(case for case in _cases(family) if case.name == "quarter")
    stock, native = pair(case)
    names, inputs = stock_names(stock), {name: tensor.to(device) for name, tensor in inputs_of(stock, 1, 5).items()}
    with ops.use_backend(backend):
        actual = results(native.to(device), names, **inputs)
    assert all(torch.isfinite(tensor).all() for tensor in actual.values())
    assert_equal(actual, results(stock.to(device), names, **inputs))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("pairing, partner", [("half-split", 4), ("interleaved", 1), ("proportional", 4)])
def test_o42_pairings(pairing: str, partner: int, backend: str, device, poisoned_empty, resolved_anew):
    """The first element of a head of 8 turns by a quarter into its partner. Proportional (Gemma 4): only a quarter of the
    head turns, but pairs are half a head apart: the others have an angle of zero."""
    angles = torch.zeros(1, 1, 8)
    angles[..., 0] = angles[..., 4] = torch.pi / 2
    if pairing != "proportional":
        angles[..., 1:4], angles[..., 5:] = 0.3, 0.3

    def turned(*elements: float) -> torch.Tensor:
        q = torch.tensor(elements, device=device).reshape(1, 1, 1, 8)
        with ops.use_backend(backend):
            q, k = ops.rope(q, q.clone(), angles.cos().to(device), angles.sin().to(device), pairing == "interleaved")
        assert torch.equal(q, k)
        return q.flatten().cpu()

    expected = torch.zeros(8)
    expected[partner] = 1.0
    torch.testing.assert_close(turned(1.0, *[0.0] * 7), expected, rtol=0, atol=1e-6)  # cos(π/2) in fp32
    if pairing == "proportional":
        assert torch.equal(turned(*[1.0] * 8)[[1, 2, 3, 5, 6, 7]], torch.ones(6))


@pytest.mark.parametrize("case", MAIN, ids=str)
def test_o43_angles_are_fp32_in_a_bf16_model(case: Case, build):
    """Cast or loaded in bf16, at position 32768: one turn of the fastest pair is 2π, so bf16 angles would be anywhere."""
    for model in (build("native", case).bfloat16(), build("native", case, dtype=torch.bfloat16)):
        rotaries = [module for module in model.modules() if isinstance(module, LigerRotaryEmbedding)]
        assert rotaries
        for rotary in rotaries:
            cos, sin = rotary(torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.tensor([[32768]]))
            assert cos.dtype == sin.dtype == rotary.inv_freq.dtype == torch.float32
            if rotary.rope_type == "default":
                _assert_turned_far(cos, sin, rotary.config.rope_parameters["rope_theta"])


def _assert_turned_far(cos: torch.Tensor, sin: torch.Tensor, theta: float) -> None:
    half = cos.shape[-1] // 2
    angle = 32768 / theta ** (torch.arange(half, dtype=torch.float64) / half)
    q = torch.randn(1, 1, 1, 2 * half, generator=torch.Generator().manual_seed(0)).bfloat16()
    a, b = q[..., :half].double(), q[..., half:].double()
    exact = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    assert error(ops.rope(q, q, cos, sin)[0], exact) < 1e-2  # the report's bound
    rounded = torch.cat([angle.bfloat16().double()] * 2)[None, None]
    assert error(ops.rope(q, q, rounded.cos(), rounded.sin())[0], exact) > 0.1


def test_o62_logit_scale_reaches_loss_and_gradients():
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(12, 16), torch.randn(40, 16), torch.randint(40, (12,))
    found = []
    for fused in (True, False):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if fused:
            loss = ops.fused_linear_cross_entropy(x, w, targets, logit_scale=0.0625)
        else:
            loss = cross_entropy(0.0625 * (x @ w.T), targets)
        loss.backward()
        found.append({"loss": loss.detach(), "hidden": x.grad, "weight": w.grad})
    assert_equal(found[0], found[1])
    assert error(found[0]["loss"], cross_entropy(hidden @ weight.T, targets)) > 100 * EPSILON[torch.float32]


def _cases(family) -> list[Case]:
    return [case for case in CASES if case.family is family]
