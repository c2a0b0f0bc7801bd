"""LoRA over every family: the stock class's target names, adapter files and merges. What needs more is in test_peft.py."""

import pytest
import torch
from models.comparison import FP32, assert_equal, error, inputs_of
from models.families import ONE_PER_FAMILY, Case

peft = pytest.importorskip("peft")

TARGETS = {"attention": ["q_proj", "v_proj"], "mlp": ["gate_proj", "gate_up_proj", "down_proj"], "all": "all-linear"}


def _adapted(model, targets):
    """The model with LoRA, its factors random: fresh ones have a zero factor, whose adapter does nothing."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return adapted


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)
def test_lora_is_what_it_is_on_the_stock_model(case: Case, targets, build, tmp_path):
    if isinstance(targets, list):  # gate_up_proj is a linear layer in the stock GLM only
        modules = {name.rpartition(".")[2] for name, _ in build("stock", case).named_modules()}
        targets = [name for name in targets if name in modules]
    found = []
    for kind in ("stock", "native"):
        model = _adapted(build(kind, case), targets)
        model.train()(**inputs_of(model)).loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        found.append((model, gradients))
    (stock, expected), (native, actual) = found
    assert len(expected) > 2
    assert_equal(actual, expected)
    inputs = inputs_of(stock)
    wanted = stock.eval()(**inputs).logits
    assert error(native.eval()(**inputs).logits, wanted) <= FP32

    native.save_pretrained(tmp_path / "native")
    loaded = peft.PeftModel.from_pretrained(build("stock", case), tmp_path / "native").eval()
    assert torch.equal(loaded(**inputs).logits, wanted)
    stock.save_pretrained(tmp_path / "stock")
    loaded = peft.PeftModel.from_pretrained(build("native", case), tmp_path / "stock").eval()
    assert error(loaded(**inputs).logits, wanted) <= FP32

    native.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = case.family.stock("causal_lm").from_pretrained(tmp_path / "merged")
    assert error(merged(**inputs).logits, wanted) <= FP32
