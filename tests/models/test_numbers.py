"""Logits, hidden states, loss and every gradient of a native model, against the stock model of the same weights."""

import re

import pytest
import torch
from models.comparison import FP32, assert_as_exact, assert_equal, error, inputs_of, results, stock_gradients, stock_names
from models.families import CASES, GPT_OSS, MAIN, MAIN_ATTENTIONS, ONE_PER_FAMILY, Case

TRAINING, EVALUATION = True, False


def _logit_weights(model, inputs, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (*inputs["labels"].shape, model.config.vocab_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(model.dtype) * 0.05


@pytest.mark.parametrize("training", [TRAINING, EVALUATION], ids=["training", "evaluation"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tensor_fp32(case: Case, training: bool, pair):
    stock, native = pair(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    stock.train(training), native.train(training)
    expected = results(stock, names, **inputs, output_hidden_states=True)
    actual = results(native, names, **inputs, output_hidden_states=True)
    assert_equal(actual, expected, without=("logits",) if training else ())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_logits_and_loss_together(case: Case, pair):
    stock, native = pair(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    weights = _logit_weights(stock, inputs)
    expected = results(stock, names, weights, **inputs)
    assert_equal(results(native, names, weights, **inputs), expected)
    native.train()
    assert_equal(results(native, names, weights, **inputs, return_logits=True), expected)


# Where a gate is at the limit of its clamp, rounding decides whether a gradient passes: an error says nothing there.
_BF16 = [(case, TRAINING) for case in CASES if case.name != "clamped"] + [(case, EVALUATION) for case in MAIN]


@pytest.mark.parametrize("case, training", _BF16, ids=[f"{c}-{'training' if t else 'evaluation'}" for c, t in _BF16])
def test_every_tensor_bf16(case: Case, training: bool, pair, build):
    """Against fp64 with the rounded weights, the native model is as exact as the stock one.

    Errors are the root mean square over six batches. In one batch the errors of a small tensor differ by chance, up to
    twofold either way; over six by less than the factor of 1.5. The floor is one rounding to bf16, for tensors whose stock
    error happens to be tiny.
    """
    options = dict(dtype=torch.bfloat16, saved_with=case.without_routing())
    stock, native = pair(case, **options)
    exact = build("stock", case, **options).double()
    names = stock_names(stock)
    for model in (stock, native, exact):
        model.train(training)
    found = []
    for seed in range(6):
        inputs = inputs_of(stock, rows=3, length=20, seed=seed)
        found.append([results(m, names, **inputs, output_hidden_states=True) for m in (native, stock, exact)])
    assert found[0][0].keys() == found[0][1].keys() - ({"logits"} if training else set())
    assert_as_exact(found, factor=1.5, floor=2.0**-8)


@pytest.mark.parametrize("case", MAIN, ids=str)
def test_fp32_is_as_exact_as_stock(case: Case, pair, build):
    """The factor allows for sums in another order; the floor is what fp64 of the stock class still rounds to fp32."""
    stock, native = pair(case)
    exact = build("stock", case).double()
    names, inputs = stock_names(stock), inputs_of(stock, rows=3, length=20)
    found = [results(m, names, **inputs, output_hidden_states=True) for m in (native, stock, exact)]
    assert_as_exact([found], factor=2.0, floor=8 * 2.0**-24)


@pytest.mark.parametrize("case", MAIN, ids=str)
def test_base_model(case: Case, build):
    stock, native = (build(kind, case, "base", saved_as="causal_lm") for kind in ("stock", "native"))
    tokens = inputs_of(stock)["input_ids"]
    expected, actual = (model(input_ids=tokens, output_hidden_states=True) for model in (stock, native))
    assert error(actual.last_hidden_state, expected.last_hidden_state) <= FP32
    assert len(actual.hidden_states) == len(expected.hidden_states) == case.options["num_hidden_layers"] + 1
    for found, right in zip(actual.hidden_states, expected.hidden_states):
        assert error(found, right) <= FP32


@pytest.mark.parametrize("case", MAIN, ids=str)
def test_attentions(case: Case, pair):
    stock, native = pair(case, attn_implementation="eager")
    inputs = inputs_of(stock)
    expected = results(stock, **inputs, output_attentions=True)
    assert f"attentions {case.options['num_hidden_layers'] - 1}" in expected
    assert_equal(results(native, **inputs, output_attentions=True), expected)
    assert_equal(
        results(native.train(), **inputs, output_attentions=True, output_hidden_states=True),
        results(stock.train(), **inputs, output_attentions=True, output_hidden_states=True),
        without=("logits",),
    )


def _masked(inputs: dict, side: str) -> dict:
    mask = torch.ones_like(inputs["input_ids"])
    if side == "left":
        mask[0, :5] = 0
    else:
        mask[0, -5:] = 0
    return {
        "input_ids": inputs["input_ids"].masked_fill(mask == 0, 0),
        "labels": inputs["labels"].masked_fill(mask == 0, -100),
        "attention_mask": mask,
    }


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case, attention", MAIN_ATTENTIONS, ids=str)
def test_padding(case: Case, attention: str, side: str, pair):
    stock, native = pair(case, attn_implementation=attention)
    names, inputs = stock_names(stock), _masked(inputs_of(stock), side)
    assert_equal(results(native, names, **inputs), results(stock, names, **inputs))
    assert_equal(results(native.train(), names, **inputs), results(stock.train(), names, **inputs), without=("logits",))


@pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)
def test_flex_attention(case: Case, pair):
    if case.family is GPT_OSS:
        pytest.skip("flex attention has no sinks on CPU")
    stock, native = pair(case, attn_implementation="flex_attention")
    inputs = _masked(inputs_of(stock), "left")
    with torch.no_grad():
        assert_equal(results(native, **inputs), results(stock, **inputs))


@pytest.mark.parametrize("case, attention", MAIN_ATTENTIONS, ids=str)
def test_four_dimensional_mask(case: Case, attention: str, pair):
    """The mask is added as given: here each token sees itself, its predecessor and the first token."""
    stock, native = pair(case, attn_implementation=attention)
    names, inputs = stock_names(stock), inputs_of(stock)
    place = torch.arange(inputs["labels"].shape[1])
    distance = place[:, None] - place[None, :]
    seen = (distance == 0) | (distance == 1) | ((place[None, :] == 0) & (distance >= 0))
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None].expand(2, 1, -1, -1)
    expected = results(stock, names, **inputs, attention_mask=mask)
    assert error(expected["logits"], results(stock, **inputs)["logits"]) > 0.01
    assert_equal(results(native, names, **inputs, attention_mask=mask), expected)


@pytest.mark.parametrize("training", [TRAINING, EVALUATION], ids=["training", "evaluation"])
@pytest.mark.parametrize("case", MAIN, ids=str)
def test_inputs_embeds(case: Case, training: bool, pair):
    found = []
    for model in pair(case):
        inputs = inputs_of(model)
        embeds = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
        outputs = model.train(training)(inputs_embeds=embeds, labels=inputs["labels"])
        outputs.loss.backward()
        found.append({"loss": outputs.loss.detach(), "gradient of the embeddings": embeds.grad})
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)
def test_input_ids_or_embeds_and_not_both(case: Case, build):
    native = build("native", case)
    tokens = inputs_of(native)["input_ids"]
    with pytest.raises(ValueError):
        native(input_ids=tokens, inputs_embeds=native.get_input_embeddings()(tokens))
    with pytest.raises(ValueError):
        native()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_position_ids(case: Case, masked: bool, pair):
    """Positions that begin late (by another number in each row), and with a mask also ones that skip."""
    stock, native = pair(case)
    inputs = inputs_of(stock)
    positions = torch.arange(inputs["labels"].shape[1]).repeat(2, 1) + torch.tensor([[5], [17]])
    if masked:
        positions[1] += torch.arange(positions.shape[1])
        inputs["attention_mask"] = torch.ones_like(positions)
    names = stock_names(stock)
    expected = results(stock, names, **inputs, position_ids=positions)
    assert_equal(results(native, names, **inputs, position_ids=positions), expected)


_DOCUMENTS = ((5, 7, 4), (9, 6, 1))  # the lengths of the documents that each row is packed from


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("labelled", [False, True], ids=["plain", "labelled"])
@pytest.mark.parametrize("training", [TRAINING, EVALUATION], ids=["training", "evaluation"])
@pytest.mark.parametrize("case, attention", MAIN_ATTENTIONS, ids=str)
def test_packed_documents_do_not_see_each_other(case: Case, attention, training, labelled, rows, pair):
    """Each document of a packed row has the logits and gradients that it has alone, whatever the default of use_cache."""
    stock, native = pair(case, attn_implementation=attention)
    names, inputs = stock_names(stock), inputs_of(stock, rows, 16)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in _DOCUMENTS[:rows]])
    labels = inputs["labels"].masked_fill(positions == 0, -100)
    stock.train(training), native.train(training)

    alone, count = [], (labels != -100).sum()
    stock.zero_grad()
    loss = 0.0
    for row, lengths in enumerate(_DOCUMENTS[:rows]):
        for tokens, own in zip(inputs["input_ids"][row].split(lengths), labels[row].split(lengths)):
            outputs = stock(input_ids=tokens[None], labels=own[None], num_items_in_batch=count)
            outputs.loss.backward()
            loss += outputs.loss.detach()
            alone.append(outputs.logits.detach())
    logits = torch.cat(alone, dim=1).reshape(rows, 16, -1)

    given = {"labels": labels} if labelled else {}
    packed = native(input_ids=inputs["input_ids"], position_ids=positions, **given)
    if not (training and labelled):
        assert error(packed.logits, logits) <= FP32
    if labelled:
        packed.loss.backward()
        assert error(packed.loss, loss) <= FP32
        assert_equal(stock_gradients(native, names), stock_gradients(stock, names))


@pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)
def test_dynamic_cache_is_returned_on_demand(case: Case, build):
    native = build("native", case)
    tokens = inputs_of(native)["input_ids"]
    outputs = native(input_ids=tokens, use_cache=True)
    cache = outputs.get("cache", outputs.get("past_key_values"))
    assert cache.get_seq_length() == tokens.shape[1]
    outputs = native(input_ids=tokens, use_cache=False)
    assert outputs.get("cache", outputs.get("past_key_values")) is None


@pytest.mark.parametrize("case", MAIN, ids=str)
def test_one_token_and_one_row(case: Case, pair):
    """A token that sees only itself attends to itself whatever query and key are: their gradients are rounding, near zero."""
    stock, native = pair(case)
    names, weights = stock_names(stock), torch.linspace(-1, 1, stock.config.vocab_size)
    for rows, length in ((1, 1), (3, 1), (1, 3)):
        tokens = {"input_ids": inputs_of(stock, rows, length)["input_ids"]}
        expected, actual = results(stock, names, weights, **tokens), results(native, names, weights, **tokens)
        if length == 1 and case.family is not GPT_OSS:  # beside a sink, a token's own score counts
            for name in [name for name in expected if re.search(r"\b[qk]_(proj|norm)\b", name)]:
                scale = expected[re.sub(r"[qk]_(proj|norm)\.\w+$", "v_proj.weight", name)].norm()
                assert expected.pop(name).norm() <= FP32 * scale
                assert actual.pop(name).norm() <= FP32 * scale, name
        # A bias on keys that are not rotated moves all scores of a query alike: what is left of its gradient is rounding.
        assert_equal(actual, expected, tolerance=2 * FP32)
