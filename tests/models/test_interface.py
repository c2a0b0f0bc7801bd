"""The classes as a user of transformers meets them: embeddings, tying, resizing; and that nothing else is changed."""

import subprocess
import sys

import pytest
import torch
from models.comparison import assert_equal, error, inputs_of, results, stock_names
from models.families import CASES, MAIN, ONE_PER_FAMILY, Case
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

main_cases = pytest.mark.parametrize("case", MAIN, ids=str)
one_case = pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)


@one_case
def test_classes(case: Case, build):
    for head in case.family.heads:
        native, stock = case.family.native(head), case.family.stock(head)
        assert issubclass(native, PreTrainedModel)
        assert not [parent for parent in native.__mro__ if parent.__module__.startswith("transformers.models.")]
        assert native.config_class is stock.config_class
        assert native.base_model_prefix == stock.base_model_prefix
        assert issubclass(native, GenerationMixin) == issubclass(stock, GenerationMixin)
    native, stock = build("native", case), build("stock", case)
    assert type(native.base_model) is case.family.native("base")
    assert type(native.config) is type(stock.config)
    assert native.num_parameters() == stock.num_parameters()
    assert native.can_generate()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_made_from_a_configuration(case: Case):
    """A new model has the stock class's distribution of weights: the scale of what is random, and the rest itself."""
    stock, native = (getattr(case.family, kind)("causal_lm")(case.configuration()) for kind in ("stock", "native"))
    inputs = inputs_of(native)
    assert torch.isfinite(native(**inputs).loss)
    assert native.num_parameters() == stock.num_parameters()
    vectors = {name: parameter for name, parameter in stock.named_parameters() if parameter.ndim == 1}
    for name, parameter in native.named_parameters():
        if (parameter.ndim > 1 and not name.endswith("bias")) or name.endswith(("sinks", "router.bias")):
            # The standard error of a standard deviation over n samples is 1/√(2n) of it; five of them.
            allowed = 5 * (2 * parameter.numel()) ** -0.5 + 0.05
            assert abs(parameter.std().item() / native.config.initializer_range - 1) < allowed, name
        else:
            assert torch.equal(parameter, vectors.get(name, torch.zeros_like(parameter))), name
    padding = native.config.pad_token_id
    if padding is not None:
        assert torch.equal(
            native.get_input_embeddings().weight[padding] == 0, stock.get_input_embeddings().weight[padding] == 0
        )


@main_cases
def test_embeddings_and_tying(case: Case, pair):
    stock, native = pair(case)
    tied = stock.config.tie_word_embeddings
    for model in (stock, native):
        assert model.get_input_embeddings() is model.base_model.get_input_embeddings()
        assert isinstance(model.get_input_embeddings(), nn.Embedding)
        assert model.get_output_embeddings() is model.lm_head
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        assert ("lm_head.weight" in dict(model.named_parameters())) == (not tied)

    new = nn.Embedding(stock.config.vocab_size, stock.config.hidden_size, padding_idx=stock.config.pad_token_id)
    head = nn.Linear(stock.config.hidden_size, stock.config.vocab_size, bias=False)
    for model in (stock, native):
        model.set_input_embeddings(new)
        assert model.get_input_embeddings() is new
        if tied:
            model.tie_weights()
            assert model.lm_head.weight is new.weight
        else:
            model.set_output_embeddings(head)
            model.tie_weights()
            assert model.get_output_embeddings() is head
    inputs = inputs_of(stock)
    assert_equal(results(native, **inputs), results(stock, **inputs))
    assert_equal(results(native.train(), **inputs), results(stock, **inputs), without=("logits",))


@pytest.mark.parametrize("size", [128, 60])
@main_cases
def test_resize_token_embeddings(case: Case, size: int, pair):
    """Both ends get the new size, tied ends stay tied, old rows stay, and loss and gradients use the new vocabulary."""
    stock, native = pair(case)
    names, before = stock_names(stock), stock.get_input_embeddings().weight.detach().clone()
    for model in (stock, native):
        torch.manual_seed(0)
        model.resize_token_embeddings(size)
        assert model.config.vocab_size == size
        assert model.get_input_embeddings().num_embeddings == model.lm_head.out_features == size
        kept = min(size, before.shape[0])
        assert torch.equal(model.get_input_embeddings().weight[:kept], before[:kept])
    assert (native.lm_head.weight is native.get_input_embeddings().weight) == stock.config.tie_word_embeddings
    with torch.no_grad():  # the rows that are new are random
        native.get_input_embeddings().weight.copy_(stock.get_input_embeddings().weight)
        native.lm_head.weight.copy_(stock.lm_head.weight)
    inputs = inputs_of(stock)
    assert_equal(results(native, names, **inputs), results(stock, names, **inputs))
    assert_equal(results(native.train(), names, **inputs), results(stock, names, **inputs), without=("logits",))


@one_case
def test_attention_implementation_can_be_set_later(case: Case, pair):
    stock, native = pair(case)
    inputs = inputs_of(stock)
    fused = "sdpa" not in case.family.attentions
    assert stock.config._attn_implementation == case.family.attentions[-1]
    assert native.config._attn_implementation == ("liger" if fused else "sdpa")
    for model in (stock, native):
        model.set_attn_implementation("eager")
        assert model.config._attn_implementation == "eager"
    expected = results(stock, **inputs, output_attentions=True)
    assert_equal(results(native, **inputs, output_attentions=True), expected)


@pytest.mark.parametrize("case", [case for case in ONE_PER_FAMILY if "sdpa" not in case.family.attentions], ids=str)
def test_attention_that_leaves_something_out_is_refused(case: Case, checkpoint):
    """scaled_dot_product_attention has no cap of the scores: transformers 5.20 runs it all the same."""
    native = case.family.native("causal_lm")
    for route, source in ((native._from_config, case.configuration()), (native.from_pretrained, checkpoint(case))):
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            route(source, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        native.from_pretrained(checkpoint(case)).set_attn_implementation("sdpa")


@one_case
def test_moved_between_dtypes(case: Case, pair, build):
    """`.to(bfloat16)` and `.double()` after loading give what the stock class gives, rope included."""
    stock, native = pair(case)
    inputs = inputs_of(stock)
    # In fp64 both classes still round norms and rope to fp32.
    assert_equal(results(native.double(), **inputs), results(stock.double(), **inputs))
    loaded, exact = build("native", case, dtype=torch.bfloat16), build("stock", case, dtype=torch.bfloat16).double()
    right = exact(**inputs).logits
    assert torch.equal(native.bfloat16()(**inputs).logits, loaded(**inputs).logits)
    # The stock class also rounds its rope's frequencies here, so that it is no nearer than when it is loaded in bf16.
    assert error(native(**inputs).logits, right) <= 1.5 * error(stock.bfloat16()(**inputs).logits, right)


_UNCHANGED = """
import importlib
import torch, transformers
modules = [importlib.import_module(family["modelling"]) for family in families]

def snapshot():
    owners = [torch.nn, torch.nn.functional, torch.Tensor, transformers.PreTrainedModel, *modules]
    owners += [v for m in modules for v in vars(m).values() if isinstance(v, type) and v.__module__ == m.__name__]
    owners += [torch.nn.Linear, torch.nn.Embedding, torch.nn.CrossEntropyLoss, torch.nn.LayerNorm, torch.nn.Module]
    return [(owner, name, value) for owner in owners for name, value in vars(owner).items() if callable(value)]

def stock_numbers():
    numbers = []
    for family in families:
        torch.manual_seed(0)
        model = getattr(transformers, family["stock"])(getattr(transformers, family["configuration"])(**family["options"]))
        tokens = torch.arange(3, 19).reshape(2, 8)
        outputs = model(input_ids=tokens, labels=tokens)
        outputs.loss.backward()
        numbers += [outputs.logits.detach(), outputs.loss.detach(), *(p.grad for p in model.parameters())]
    return numbers

numbers, before = stock_numbers(), snapshot()  # transformers itself adds to nn.Module when it makes its first model
import liger_models
for family in families:
    configuration = getattr(transformers, family["configuration"])(**family["options"])
    native = getattr(liger_models, family["native"])(configuration).train()
    tokens = torch.arange(3, 19).reshape(2, 8)
    native(input_ids=tokens, labels=tokens).loss.backward()
    native.generate(tokens, max_new_tokens=2, do_sample=False)
changed = [(owner, name) for owner, name, value in before if vars(owner).get(name) is not value]
assert not changed, changed
known = {(owner, name) for owner, name, value in before}
added = [(owner, name) for owner, name, value in snapshot() if (owner, name) not in known]
assert not added, added
assert all(torch.equal(a, b) for a, b in zip(numbers, stock_numbers(), strict=True))
print("unchanged")
"""

_INDEPENDENT = """
import sys
import torch, transformers, liger_models
for family in families:
    configuration = getattr(transformers, family["configuration"])(**family["options"])
    native = getattr(liger_models, family["native"])(configuration).train()
    tokens = torch.arange(3, 19).reshape(2, 8)
    # The family's first call is compiled: nothing may rely on what an earlier, eager call has cached. Families share code, of
    # which the compiler keeps eight versions at most.
    torch._dynamo.reset()
    torch.compile(native, fullgraph=True, backend="eager")(input_ids=tokens, labels=tokens).loss.backward()
    native(input_ids=tokens, labels=tokens).loss.backward()
    native.generate(tokens, max_new_tokens=2, do_sample=False)
    assert family["modelling"] not in sys.modules, family["modelling"]
print("independent")
"""


_PROGRAMS = {"unchanged": _UNCHANGED, "independent": _INDEPENDENT}


@pytest.mark.parametrize("word", _PROGRAMS)
def test_stock_classes_are(word: str):
    """Native classes neither change nor need the stock ones: same objects and bit-equal numbers after as before."""
    families = [
        {
            "modelling": case.family.modelling,
            "stock": case.family.heads["causal_lm"],
            "native": case.family.native("causal_lm").__name__,
            "configuration": case.family.configuration,
            "options": case.options,
        }
        for case in ONE_PER_FAMILY
    ]
    text = f"families = {families!r}\n{_PROGRAMS[word]}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == word
