"""LoRA on every family means what it means on the stock model: names, losses, gradients, files, merges.

What needs more than that is tested on Llama in test_peft.py.
"""

import re

import pytest
import torch
from models.comparison import FP32, assert_equal, error, inputs_of
from models.families import GLM, GLM4, MAIN, Case
from safetensors.torch import load_file
from tiny_llama import assert_same_tensors, read_tensors
from torch import nn

peft = pytest.importorskip("peft")

# The product of A and B takes two more sums than the layer that it adapts, forwards and backwards.
ADAPTED = 2 * FP32
QUERY_AND_VALUE, EVERY_NAME, ALL_LINEAR = "query and value", "every name", "all-linear"
TARGETS = (QUERY_AND_VALUE, EVERY_NAME, ALL_LINEAR)

every_family = pytest.mark.parametrize("case", MAIN, ids=str)
every_target = pytest.mark.parametrize("target", TARGETS)


def names_of(stock: nn.Module, target: str) -> list[str] | str:
    """A list of target modules as users of the stock model write it."""
    linear = {name.rpartition(".")[2] for name, module in stock.base_model.named_modules() if isinstance(module, nn.Linear)}
    if target == QUERY_AND_VALUE:
        return ["q_proj", "v_proj", *sorted(linear & {"gate_up_proj"})]
    return sorted(linear) if target == EVERY_NAME else target


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.fixture
def adapted(pair):
    """The stock and the native model of a case under LoRA, with equal random adapters, in training mode."""

    def make(case: Case, target: str) -> list[nn.Module]:
        models = pair(case)
        config = peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", target_modules=names_of(models[0], target))
        models = [peft.get_peft_model(model, config).train() for model in models]
        for model in models:
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for _, parameter in sorted(adapters(model).items()):
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        return models

    return make


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Loss and gradients of the adapters; nothing else may have a gradient."""
    loss = model(**inputs_of(model)).loss
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in adapters(model).items()}}


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=inputs_of(model)["input_ids"]).logits


@every_target
@every_family
def test_adapters_are_the_stock_ones(case: Case, target: str, adapted):
    """Names and shapes, loss and gradients."""
    stock, native = adapted(case, target)
    shapes = [{name: parameter.shape for name, parameter in adapters(model).items()} for model in (stock, native)]
    assert shapes[1] == shapes[0]
    modules = {re.search(r"(\w+)\.lora_", name)[1] for name in shapes[1]}
    expected = {"q_proj", "v_proj"} | ({"gate_up_proj"} if case.family in (GLM, GLM4) else set())
    assert modules == expected if target == QUERY_AND_VALUE else modules > expected
    found = trained(stock)
    assert all(tensor.any() for tensor in found.values()), "a gradient that is zero shows nothing"
    assert_equal(trained(native), found, ADAPTED)


@every_target
@every_family
def test_adapter_files(tmp_path, case: Case, target: str, adapted, pair):
    """Each class writes the same file, and reads the other's."""
    models, fresh = adapted(case, target), pair(case)
    plain = logits_of(fresh[0])
    for model, name in zip(models, ("stock", "native")):
        model.save_pretrained(tmp_path / name)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("stock", "native")]
    assert_same_tensors(files[1], files[0])
    for other, name, model in zip(fresh, ("native", "stock"), models):
        loaded = peft.PeftModel.from_pretrained(other, tmp_path / name)
        assert torch.equal(logits_of(loaded), logits_of(model))
        assert error(logits_of(loaded), plain) > 0.01, "the adapter changes nothing"


@every_target
@every_family
def test_merged_export(tmp_path, case: Case, target: str, adapted, checkpoint):
    """merge_and_unload, then save: the stock model's merged checkpoint, and its logits."""
    merged = [model.merge_and_unload() for model in adapted(case, target)]
    for model, name in zip(merged, ("stock", "native")):
        model.save_pretrained(tmp_path / name)
    tensors = [read_tensors(tmp_path / name) for name in ("stock", "native")]
    assert_equal(tensors[1], tensors[0])
    original = read_tensors(checkpoint(case))
    changed = [{name for name in original if not torch.equal(found[name], original[name])} for found in tensors]
    assert changed[1] == changed[0] != set()
    stock = case.family.stock("causal_lm")
    reloaded = stock.from_pretrained(tmp_path / "native", attn_implementation=case.family.attentions[-1])
    assert error(logits_of(merged[1]), logits_of(reloaded)) <= FP32


@every_family
def test_disabled_and_unloaded_adapters_leave_the_base(tmp_path, case: Case, adapted, pair, checkpoint):
    _, native = adapted(case, ALL_LINEAR)
    expected = logits_of(pair(case)[1])
    with native.disable_adapter():
        assert error(logits_of(native), expected) <= FP32
    native = native.unload()
    assert torch.equal(logits_of(native), expected)
    native.save_pretrained(tmp_path)
    assert_same_tensors(read_tensors(tmp_path), read_tensors(checkpoint(case)))
