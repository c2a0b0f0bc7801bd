"""Gemma-3-270m, real weights: `make test-real` downloads them, since they may not be passed on."""

import sys
from pathlib import Path

import pytest
import torch
from tiny_llama import assert_same_tensors, export, read_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from liger_models import LigerGemma3ForCausalLM, register_auto_models

sys.path.append(str(Path(__file__).parents[2] / "examples"))

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

# Two runs in fp32 that differ in the order of their sums, through 18 layers: a few hundred roundings of half a spacing.
TOLERANCE = 1024 * 2.0**-24


@pytest.fixture(scope="module")
def checkpoint():
    from real_models import gemma3_checkpoint

    return gemma3_checkpoint()


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    """800 tokens of English: longer than the window of 512."""
    from real_models import shakespeare_text

    return tokenizer(shakespeare_text()[20000:26000], return_tensors="pt").input_ids[:, :800]


@pytest.fixture(scope="module")
def models(checkpoint):
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    native = LigerGemma3ForCausalLM.from_pretrained(checkpoint)
    assert type(stock).__name__ == "Gemma3ForCausalLM" and stock.config.sliding_window == 512
    return stock.eval(), native.eval()


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).double().norm() / expected.double().norm()).item()


def test_logits_on_real_text(models, tokens):
    stock, native = models
    assert tokens.shape[1] == 800
    with torch.no_grad():
        expected, actual = (model(input_ids=tokens).logits for model in (stock, native))
    print(f"largest difference {(actual - expected).abs().max():.2e}, relative {difference(actual, expected):.2e}")
    assert difference(actual, expected) <= TOLERANCE
    # The weights are four-bit ones, but they are weights: half of what the model finds likeliest is right at all.
    assert (expected[0, :-1].argmax(-1) == tokens[0, 1:]).double().mean() > 0.2


def test_loss_and_gradients(checkpoint, models, tokens):
    """As near to fp64 as the stock class. (torch's own cross-entropy over 262144 columns costs it three digits in fp32; the
    stock class rounds its logits to fp32 even in fp64, so the exact loss is taken here.)"""
    stock, native = models
    tokens = tokens[:, :600]
    found = [_gradients(model, model.train()(input_ids=tokens, labels=tokens).loss) for model in (stock, native)]
    exact = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    logits = exact(input_ids=tokens).logits[0, :-1]
    right = _gradients(exact, torch.nn.functional.cross_entropy(logits, tokens[0, 1:]))
    for name, expected in right.items():
        of_stock, of_native = (difference(gradients[name].double(), expected) for gradients in found)
        print(f"{name}: {of_native:.1e} from fp64, stock {of_stock:.1e}")
        assert of_native <= of_stock + TOLERANCE, name


def _gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    attention = model.model.layers[5].self_attn
    packed = getattr(attention, "qkv_proj", None)
    query = attention.q_proj.weight.grad if packed is None else packed.weight.grad[: attention.q_proj.out_features]
    gradients = {
        "loss": loss.detach(),
        "q_proj": query.clone(),
        "q_norm": attention.q_norm.weight.grad.clone(),
        "norm": model.model.norm.weight.grad.clone(),
        "lm_head": model.lm_head.weight.grad.clone(),
    }
    model.zero_grad()
    model.eval()
    return gradients


def test_generated_text_agrees_token_by_token(models, tokenizer):
    tokenizer.padding_side = "left"
    prompts = ["The capital of France is", "Once upon a time there was a little girl who", "2, 4, 6,"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    assert (batch.attention_mask == 0).any()
    expected, actual = (model.generate(**batch, max_new_tokens=24, do_sample=False) for model in models)
    assert torch.equal(actual, expected)
    texts = tokenizer.batch_decode(actual, skip_special_tokens=True)
    print(*texts, sep="\n")
    assert "France" in texts[0].removeprefix(prompts[0])  # it stays on the subject


def test_pipeline_with_registered_classes(checkpoint):
    with register_auto_models():
        native = pipeline("text-generation", str(checkpoint), device="cpu")
    assert type(native.model) is LigerGemma3ForCausalLM
    stock = pipeline("text-generation", str(checkpoint), device="cpu")
    prompt = "To be, or not to be: that is"
    found = [pipe(prompt, max_new_tokens=12, do_sample=False)[0]["generated_text"] for pipe in (stock, native)]
    assert found[0] == found[1]


def test_export_is_bit_identical(checkpoint, models, tmp_path):
    assert_same_tensors(export(models[1], tmp_path), read_tensors(checkpoint))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded).__name__ == "Gemma3ForCausalLM"
