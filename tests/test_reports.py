"""Public bug reports against peers and the stock library, as rows O36 to O43 and O62 of the list that this project keeps, where
no other test shows them."""

import importlib

import pytest
import torch
from checks import EPSILON
from models.comparison import FP32, assert_equal, error, inputs_of, results, stock_names
from models.families import CASES, GEMMA, GEMMA2, GEMMA3, GLM, GLM4, MAIN, ONE_PER_FAMILY, Case, randomise
from torch.nn.functional import cross_entropy, gelu

from liger_models import ops
from liger_models.decoder import LigerRotaryEmbedding
from liger_models.layers.norm import LigerRMSNorm


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)
def test_o36_what_is_masked_does_not_matter(case: Case, side: str):
    """Padding tokens, and tokens whose labels are ignored, changed at random: the same loss and gradients."""
    torch.manual_seed(0)
    model = case.family.native("causal_lm")(case.configuration()).train()
    randomise(model)
    names, inputs = [name for name, _ in model.named_parameters()], inputs_of(model)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, slice(0, 5) if side == "left" else slice(8, None)] = 0
    labels = inputs["labels"].masked_fill(mask == 0, -100)
    labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    found = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(3, model.config.vocab_size, mask.shape, generator=generator)
        tokens = torch.where(mask == 1, inputs["input_ids"], noise)
        found.append(results(model, names, input_ids=tokens, labels=labels, attention_mask=mask))
    embedding = "gradient of model.embed_tokens.weight"
    if not model.config.tie_word_embeddings:
        found[0].pop(embedding), found[1].pop(embedding)  # that of the row of a padding token is a rounded zero
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("family, name", [(GEMMA, "GemmaRMSNorm"), (GEMMA2, "Gemma2RMSNorm"), (GEMMA3, "Gemma3RMSNorm")])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_o37_gemma_norm_is_bit_equal_in_bf16(family, name: str, scale: float):
    torch.manual_seed(0)
    stock = getattr(importlib.import_module(family.modelling), name)(96, eps=1e-6).bfloat16()
    native = LigerRMSNorm(96, eps=1e-6, offset=1.0, scale_in_fp32=True).bfloat16()
    with torch.no_grad():
        stock.weight.normal_()
        native.weight.copy_(stock.weight)
    x = (torch.randn(64, 96) * scale).bfloat16()
    assert torch.equal(native(x), stock(x))
    composed, fused = native(x + x), ops.fused_add_rms_norm(x, x, native.weight, 1e-6, 1.0, True)[0]
    assert torch.equal(composed, fused)


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_o38_soft_cap_inside_the_fused_loss(scale: float):
    """Logits around ±100 against a cap of 30."""
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(24, 16), torch.randn(50, 16) * scale / 4, torch.randint(50, (24,))
    found = []
    for fused in (True, False):
        x, w = (t.double() if not fused else t.clone() for t in (hidden, weight))
        x, w = x.requires_grad_(), w.requires_grad_()
        if fused:
            loss = ops.fused_linear_cross_entropy(x, w, targets, softcap=30.0)
        else:
            logits = x @ w.T
            assert scale == 1.0 or logits.abs().max() > 90
            loss = cross_entropy(30.0 * torch.tanh(logits / 30.0), targets)
        loss.backward()
        found.append({"loss": loss.detach(), "hidden": x.grad, "weight": w.grad})
    # Logits of 16 products of size 100 are right to 16 · 2⁻²⁴ · 100, and so are the losses' gradients relative to one.
    assert_equal(found[0], found[1], tolerance=1600 * 2.0**-24 if scale > 1 else FP32)


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


@pytest.mark.parametrize("family", [GLM, GLM4], ids=lambda family: family.name)
def test_o41_partial_rotation_is_finite_and_equal(family, pair, monkeypatch):
    """With a quarter of a head rotated, memory that nothing was written to would show as NaN."""
    empty = torch.empty

    def poisoned(*arguments, **options):
        tensor = empty(*arguments, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    stock, native = pair(next(case for case in _cases(family) if case.name == "quarter"))
    names, inputs = stock_names(stock), inputs_of(stock)
    actual = results(native, names, **inputs)
    assert all(torch.isfinite(tensor).all() for tensor in actual.values())
    assert_equal(actual, results(stock, names, **inputs))


@pytest.mark.parametrize("pairing, partner", [("half-split", 4), ("interleaved", 1), ("proportional", 4)])
def test_o42_pairings(pairing: str, partner: int):
    """The first element of a head of 8 turns by a quarter into its partner. Proportional (Gemma 4): only a quarter of the
    head turns, but pairs are half a head apart: the others have an angle of zero."""
    angles = torch.zeros(1, 1, 8)
    angles[..., 0] = angles[..., 4] = torch.pi / 2
    if pairing != "proportional":
        angles[..., 1:4], angles[..., 5:] = 0.3, 0.3
    q = torch.zeros(1, 1, 1, 8)
    q[..., 0] = 1.0
    turned, _ = ops.rope(q, q.clone(), angles.cos(), angles.sin(), pairing == "interleaved")
    expected = torch.zeros(8)
    expected[partner] = 1.0
    torch.testing.assert_close(turned[0, 0, 0], expected, rtol=0, atol=1e-6)
    other = torch.ones(1, 1, 1, 8)
    turned, _ = ops.rope(other, other.clone(), angles.cos(), angles.sin(), pairing == "interleaved")
    if pairing == "proportional":
        assert torch.equal(turned[0, 0, 0, [1, 2, 3, 5, 6, 7]], torch.ones(6))


@pytest.mark.parametrize("case", [case for case in MAIN if case.family is not GEMMA3], ids=str)
def test_o43_angles_are_fp32_in_a_bf16_model(case: Case):
    rotary = case.family.native("base")(case.configuration()).bfloat16().rotary_emb
    assert isinstance(rotary, LigerRotaryEmbedding) and rotary.inv_freq.dtype == torch.float32
    positions = torch.tensor([[32768]])
    cos, sin = rotary(torch.zeros(1, 1, 1, dtype=torch.bfloat16), positions)
    assert cos.dtype == sin.dtype == torch.float32
    if rotary.rope_type != "default":
        return
    angle = 32768 * rotary.inv_freq.double()
    half = angle.shape[0]
    q = torch.randn(1, 1, 1, 2 * half).bfloat16()
    turned, _ = ops.rope(q, q.clone(), cos, sin)
    a, b = q[..., :half].double(), q[..., half:].double()
    exact = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    assert error(turned, exact) < 1e-2


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
