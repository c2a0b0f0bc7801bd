"""Training: checkpointing, dropout, frozen parts, autocast, hooks and replaced modules, and some steps of an optimiser."""

import pytest
import torch
from models.comparison import (
    FP32,
    assert_as_exact,
    assert_equal,
    document_masks,
    error,
    inputs_of,
    results,
    stock_gradients,
    stock_names,
)
from models.families import MAIN, ONE_PER_FAMILY, Case

main_cases = pytest.mark.parametrize("case", MAIN, ids=str)
one_case = pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)


@pytest.mark.parametrize("embeds", [False, True], ids=["tokens", "embeddings"])
@pytest.mark.parametrize("reentrant", [False, True])
@main_cases
def test_gradient_checkpointing(case: Case, reentrant: bool, embeds: bool, pair):
    """Loss and gradients are those without it, and each layer does run a second time."""
    stock, native = pair(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    if embeds:
        inputs["inputs_embeds"] = stock.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    expected = results(native.train(), names, **inputs)
    assert_equal(expected, results(stock, names, **inputs), without=("logits",))
    native.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    runs = []
    for layer in native.base_model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, arguments: runs.append(module))
    assert_equal(results(native, names, **inputs), expected)
    for layer in native.base_model.layers:
        assert runs.count(layer.mlp) == 2
    native.gradient_checkpointing_disable()
    runs.clear()
    assert_equal(results(native, names, **inputs), expected)
    assert runs == [layer.mlp for layer in native.base_model.layers]


@one_case
def test_checkpointed_packed_documents_with_use_cache_left_on(case: Case, pair):
    stock, native = pair(case)
    names, inputs = stock_names(stock), inputs_of(stock, 1, 16)
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    masks = document_masks(stock, positions)
    expected = results(stock, names, **inputs, **masks, position_ids=positions, use_cache=False)
    native.train().gradient_checkpointing_enable()
    assert_equal(results(native, names, **inputs, position_ids=positions), expected, without=("logits",))
    with_hidden = results(native, names, **inputs, position_ids=positions, output_hidden_states=True)
    assert_equal({k: v for k, v in with_hidden.items() if "hidden" not in k}, expected, without=("logits",))


@main_cases
def test_attention_dropout(case: Case, pair):
    """With the eager attention the same seed drops the same weights as in the stock class; in evaluation none."""
    stock, native = pair(case, attn_implementation="eager", attention_dropout=0.4)
    names, inputs = stock_names(stock), inputs_of(stock)
    found = []
    for model in (stock, native):
        torch.manual_seed(0)
        found.append(results(model.train(), names, **inputs))
    assert_equal(found[1], found[0], without=("logits",))
    without = results(native.eval(), names, **inputs)
    assert error(found[1]["loss"], without["loss"]) > 1e-4
    assert_equal(without, results(stock.eval(), names, **inputs))
    _, plain = pair(case)
    assert_equal(results(plain, names, **inputs), without)


@one_case
def test_attention_dropout_sdpa(case: Case, pair):
    _, native = pair(case, attention_dropout=0.4)
    inputs = inputs_of(native)
    losses = [native.train()(**inputs).loss.item() for _ in range(3)]
    assert len(set(losses)) == 3
    losses = [native.eval()(**inputs).loss.item() for _ in range(2)]
    assert len(set(losses)) == 1


def _backbone(name: str) -> bool:
    return not name.startswith("lm_head")


_FROZEN = {
    "backbone": _backbone,
    "head": lambda name: name.startswith("lm_head"),
    "norms": lambda name: "norm" in name,
    "all but norms": lambda name: "norm" not in name,
    "embedding": lambda name: "embed_tokens" in name,
    "first layer": lambda name: ".layers.0." in name,
    "attention": lambda name: "self_attn" in name,
    "mlp": lambda name: ".mlp." in name,
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("frozen", _FROZEN)
@main_cases
def test_frozen(case: Case, frozen: str, training: bool, pair):
    """A frozen parameter gets no gradient; the others get the same as in the stock class."""
    stock, native = pair(case)
    if stock.config.tie_word_embeddings and frozen == "backbone":
        pytest.skip("a tied head is part of the backbone")
    inputs = inputs_of(stock)
    names = stock_names(stock)
    for model in (stock, native):
        model.train(training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not _FROZEN[frozen](name))
        model(**inputs).loss.backward()
    actual, expected = stock_gradients(native, names), stock_gradients(stock, names)
    assert [n for n in names if actual[n] is None] == [n for n in names if expected[n] is None]
    kept = [name for name in names if expected[name] is not None]
    assert kept
    assert len(kept) < len(names) or (stock.config.tie_word_embeddings and frozen == "head")
    assert_equal({name: actual[name] for name in kept}, {name: expected[name] for name in kept})


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@one_case
def test_everything_frozen_but_the_input(case: Case, training: bool, pair):
    """As when a prompt is tuned: the gradient passes a model that has none of its own."""
    found = []
    for model in pair(case):
        inputs = inputs_of(model)
        model.train(training).requires_grad_(False)
        embeds = model.get_input_embeddings()(inputs["input_ids"]).requires_grad_()
        model(inputs_embeds=embeds, labels=inputs["labels"]).loss.backward()
        found.append({"input": embeds.grad})
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@main_cases
def test_autocast(case: Case, training: bool, pair):
    """fp32 weights under bf16 autocast: as near to fp32 as the stock class, gradients in fp32.

    The factor and the floor of one rounding to bf16 are those of bf16 models.
    """
    stock, native = pair(case, saved_with=case.without_routing())
    names, found = stock_names(stock), []
    stock.train(training), native.train(training)
    for seed in range(4):
        inputs = inputs_of(stock, rows=3, length=20, seed=seed)
        exact = results(stock, names, **inputs)
        with torch.autocast("cpu", torch.bfloat16):
            found.append([results(native, names, **inputs), results(stock, names, **inputs), exact])
    actual, expected, exact = found[0]
    assert actual.keys() == expected.keys() - ({"logits"} if training else set())
    assert all(tensor.dtype == torch.float32 for name, tensor in actual.items() if name.startswith("gradient"))
    assert error(expected["loss"], exact["loss"]) > FP32
    assert_as_exact(found, factor=1.5, floor=2.0**-8)


def _leaves(model) -> list[str]:
    """Names of the stock model's modules that hold weights themselves."""
    return [name for name, module in model.named_modules() if not list(module.children()) and list(module.parameters())]


def _hooked(module, when: str):
    """Register a hook that changes what goes in, what comes out, or the gradient that leaves, by no factor: a norm behind it
    would undo that."""
    if when == "before":
        return module.register_forward_pre_hook(lambda module, arguments: (arguments[0] + 0.3, *arguments[1:]))
    if when == "after":
        return module.register_forward_hook(
            lambda module, arguments, output: _changed(output, lambda y: y * torch.linspace(0.5, 1.5, y.shape[-1]))
        )
    return module.register_full_backward_hook(
        lambda module, inward, outward: tuple(g * 1.5 if g is not None and g.is_floating_point() else g for g in inward)
    )


@pytest.mark.parametrize("when", ["before", "after", "backward"])
@one_case
def test_hooks_on_every_module(case: Case, when: str, pair):
    """A hook on any module of a stock name sees and changes what it does in the stock class, one module at a time."""
    stock, native = pair(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    embedding = "gradient of model.embed_tokens.weight"
    plain = results(stock, names, **inputs)[embedding]
    native.train()
    wrong = []
    for leaf in _leaves(stock):
        if when != "after" and leaf.endswith("embed_tokens"):
            continue  # token ids cannot be changed so, and have no gradient
        found = []
        for model in (stock, native):
            handle = _hooked(model.get_submodule(leaf), when)
            found.append(results(model, names, **inputs))
            handle.remove()
        expected, actual = found
        assert error(expected[embedding], plain) > 1e-4, leaf
        if any(not error(actual[name], tensor) <= FP32 for name, tensor in expected.items() if name != "logits"):
            wrong.append(leaf)
    assert not wrong


def _changed(output, change):
    """A module's output, or, of a router's logits, weights and ids, the weights, changed."""
    if isinstance(output, torch.Tensor):
        return change(output)
    logits, weights, ids = output
    return logits, change(weights), ids


class _Scaled(torch.nn.Module):
    """A module around another, as adapters and quantised layers are."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *arguments, **options):
        return _changed(self.inner(*arguments, **options), lambda output: 1.5 * output)


@one_case
def test_replaced_modules(case: Case, pair):
    """Another module in the place of one with a stock name runs in its stead."""
    stock, native = pair(case)
    inputs = inputs_of(stock)
    stock.train(), native.train()
    before, wrong = native(**inputs).loss, []
    for leaf in _leaves(stock):
        owner, _, name = leaf.rpartition(".")
        found = []
        for model in (stock, native):
            place = model.get_submodule(owner)
            plain = getattr(place, name)
            setattr(place, name, _Scaled(plain))
            with torch.no_grad():
                found.append(model(**inputs).loss)
            setattr(place, name, plain)
        if not error(found[1], found[0]) <= FP32:
            wrong.append(leaf)
    assert not wrong
    assert error(native(**inputs).loss, before) <= FP32


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@main_cases
def test_steps_of_adamw(case: Case, checkpointed: bool, pair):
    """The losses of ten steps. AdamW divides by the size of a gradient: an error of its last digits grows with the steps."""
    losses = []
    for model in pair(case):
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
        inputs, found = inputs_of(model, rows=4), []
        for _ in range(10):
            loss = model(**inputs).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    assert losses[0][-1] < 0.8 * losses[0][0]
    assert error(losses[1], losses[0]) <= 10 * FP32
