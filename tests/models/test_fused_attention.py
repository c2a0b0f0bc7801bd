"""`attn_implementation="liger"`, the kernel set's attention, against the stock class's eager one.

A query that sees no key, which only padding has, gets zeros here and the mean of all values there: padding is left out of what
is compared.
"""

import pytest
import torch
from models.comparison import FP32, assert_equal, document_masks, error, inputs_of, results, stock_gradients, stock_names
from models.families import CAUSAL, ONE_PER_FAMILY, Case

from liger_models.attention import KeyIntervals, key_intervals

one_case = pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)


@pytest.fixture
def models(build):
    def load(case: Case, **options):
        stock = build("stock", case, attn_implementation="eager", **options)
        return stock, build("native", case, attn_implementation="liger", **options)

    return load


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_every_tensor_fp32(case: Case, training: bool, models):
    stock, native = models(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    expected = results(stock.train(training), names, **inputs)
    assert_equal(results(native.train(training), names, **inputs), expected, without=("logits",) if training else ())


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@one_case
def test_padding(case: Case, padding: str, models):
    stock, native = models(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    mask = torch.ones_like(inputs["input_ids"])
    hidden = {"none": slice(0, 0), "left": slice(0, 5), "right": slice(8, None), "holes": slice(3, 6)}[padding]
    mask[0, hidden] = 0
    labels = inputs["labels"].masked_fill(mask == 0, -100)
    # The label of a position belongs to the logits before it: those of padding must not count.
    labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    given = {"input_ids": inputs["input_ids"], "labels": labels, "attention_mask": mask}
    expected, actual = results(stock, names, **given), results(native, names, **given)
    for found in (expected, actual):
        found["logits"] = found["logits"][mask == 1]
    assert_equal(actual, expected)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@one_case
def test_packed_documents(case: Case, training: bool, models):
    """Two rows of documents; the stock class's own detection is what they are compared with."""
    stock, native = models(case)
    names, inputs = stock_names(stock), inputs_of(stock, 2, 16)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ((5, 7, 4), (9, 6, 1))])
    given = {**inputs, "position_ids": positions, "use_cache": False}
    apart = results(stock.train(training), names, **given, **document_masks(stock, positions))
    assert error(apart["loss"], results(stock, **inputs)["loss"]) > 1e-3
    assert_equal(results(native.train(training), names, **given), apart, without=("logits",) if training else ())


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@one_case
def test_generation_with_left_padding(case: Case, kind: str, models):
    stock, native = models(case)
    tokens = inputs_of(stock, 2, 9)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, cache_implementation=kind, disable_compile=True)
    assert torch.equal(native.generate(tokens, **options), stock.generate(tokens, **options))


@one_case
def test_weights_are_returned_on_demand(case: Case, models):
    stock, native = models(case)
    inputs = inputs_of(stock)
    assert_equal(results(native, **inputs, output_attentions=True), results(stock, **inputs, output_attentions=True))
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, -4:] = 0
    given = {**inputs, "attention_mask": mask, "output_attentions": True}
    assert_equal(results(native, **given), results(stock, **given))


@one_case
def test_dropout(case: Case, models):
    """The op has none; the same seed drops the same weights as in the stock class."""
    found = []
    for model in models(case, attention_dropout=0.4):
        torch.manual_seed(0)
        found.append(model.train()(**inputs_of(model)).loss)
    assert error(found[1], found[0]) <= FP32
    assert error(found[0], model.eval()(**inputs_of(model)).loss) > 1e-4


@one_case
def test_four_dimensional_mask(case: Case, models):
    stock, native = models(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    place = torch.arange(inputs["labels"].shape[1])
    distance = place[:, None] - place[None, :]
    seen = (distance == 0) | (distance == 1) | ((place[None, :] == 0) & (distance >= 0))
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None].expand(2, 1, -1, -1)
    assert_equal(results(native, names, **inputs, attention_mask=mask), results(stock, names, **inputs, attention_mask=mask))


@one_case
def test_gradient_checkpointing(case: Case, models):
    stock, native = models(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    stock.train()(**inputs).loss.backward()
    native.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    native.train()(**inputs).loss.backward()
    assert_equal(stock_gradients(native, names), stock_gradients(stock, names))


def _seen(intervals: KeyIntervals, keys: int) -> torch.Tensor:
    return intervals.additive_mask(keys, torch.float32) == 0


def test_intervals_of_a_mask_function():
    """Read off in pieces, with an offset, and with a row that sees nothing."""

    def function(batch, head, query, key):
        return (key <= query) & (key > query - 3) & (query != 12)

    expected = torch.tensor(
        [[key <= query and key > query - 3 and query != 12 for key in range(2, 22)] for query in range(9, 19)]
    )
    intervals = key_intervals(1, 10, 20, q_offset=9, kv_offset=2, mask_function=function, allow_is_causal_skip=False)
    assert torch.equal(_seen(intervals, 20)[0, 0], expected)


def test_a_mask_with_a_gap_is_refused():
    def function(batch, head, query, key):
        return (key == 0) | (key == query)

    with pytest.raises(RuntimeError, match="gap between them"):
        key_intervals(1, 4, 4, mask_function=function, allow_is_causal_skip=False)


def test_intervals_are_read_off_in_pieces(monkeypatch):
    monkeypatch.setattr("liger_models.attention._PAIRS", 50)

    def function(batch, head, query, key):
        return key <= query

    pieces = key_intervals(1, 10, 20, mask_function=function, allow_is_causal_skip=False)
    assert torch.equal(pieces.last_key[0], torch.arange(10, dtype=torch.int32))
    assert torch.equal(pieces.first_key[0], torch.zeros(10, dtype=torch.int32))
