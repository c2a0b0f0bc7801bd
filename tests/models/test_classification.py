"""Sequence classification: the stock class's logits, losses and gradients for each of its three problems."""

import pytest
import torch
from models.comparison import FP32, assert_equal, cache_name, error, inputs_of, results, stock_names
from models.families import HEADS, ONE_PER_HEAD, Case

main_cases = pytest.mark.parametrize("case", HEADS, ids=str)
one_case = pytest.mark.parametrize("case", ONE_PER_HEAD, ids=str)
HEAD = "sequence_classification"

_PROBLEMS = {
    "single label": (4, torch.tensor([3, 0, 1])),
    "multi label": (4, torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]])),
    "regression": (1, torch.tensor([0.3, -2.0, 1.5])),
    "regression of several": (2, torch.tensor([[0.3, 1.0], [-2.0, 0.1], [1.5, 0.0]])),
}


def _inputs(model, side: str) -> dict[str, torch.Tensor]:
    tokens = inputs_of(model, rows=3)["input_ids"]
    mask = torch.ones_like(tokens)
    if side == "left":
        mask[0, :5] = 0
        mask[2, :1] = 0
    elif side == "right":
        mask[0, -5:] = 0
        mask[2, -1:] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}


def _of_tokens(found: dict, inputs: dict) -> dict:
    """Without the hidden states of padding: where nothing is to be seen, attention functions differ in what they return."""
    seen = inputs["attention_mask"] == 1
    return {name: tensor[seen] if name.startswith("hidden_states") else tensor for name, tensor in found.items()}


def _problem(name: str) -> dict:
    options = {"num_labels": _PROBLEMS[name][0]}
    if name == "regression of several":
        options["problem_type"] = "regression"
    return options


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("problem", _PROBLEMS)
@main_cases
def test_every_tensor(case: Case, problem: str, side: str, training: bool, pair):
    stock, native = pair(case, HEAD, saved_with=_problem(problem))
    names, inputs = stock_names(stock), _inputs(stock, side)
    stock.train(training), native.train(training)
    labels = _PROBLEMS[problem][1]
    expected = _of_tokens(results(stock, names, **inputs, labels=labels, output_hidden_states=True), inputs)
    assert expected["logits"].shape == (3, _PROBLEMS[problem][0])
    found = results(native, names, **inputs, labels=labels, output_hidden_states=True)
    assert_equal(_of_tokens(found, inputs), expected)
    assert native.config.problem_type == stock.config.problem_type


@one_case
def test_without_labels_as_a_tuple_and_from_embeddings(case: Case, pair):
    stock, native = pair(case, HEAD, saved_with=_problem("single label"))
    inputs = _inputs(stock, "left")
    expected = stock(**inputs).logits
    outputs = native(**inputs)
    assert outputs.loss is None
    assert error(outputs.logits, expected) <= FP32
    assert outputs.get(cache_name(native)) is None or outputs[cache_name(native)].get_seq_length() == 13
    assert error(native(**inputs, return_dict=False)[0], expected) <= FP32
    embeds = stock.get_input_embeddings()(inputs["input_ids"])
    from_embeds = native(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits
    assert error(from_embeds, stock(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits) <= FP32


@one_case
def test_batches_need_a_padding_token(case: Case, pair):
    """Without one the end of a row is unknown: the stock class refuses, but for a single row."""
    stock, native = pair(case, HEAD, saved_with=_problem("single label"))
    tokens = inputs_of(stock)["input_ids"]
    stock.config.pad_token_id = native.config.pad_token_id = None
    for model in (stock, native):
        with pytest.raises(ValueError, match="padding token"):
            model(input_ids=tokens)
    assert error(native(input_ids=tokens[:1]).logits, stock(input_ids=tokens[:1]).logits) <= FP32


@main_cases
def test_from_a_causal_lm_checkpoint(case: Case, build):
    """The backbone is loaded and the head is new, of the number of labels asked for."""
    stock, native = (build(kind, case, HEAD, saved_as="causal_lm", num_labels=5) for kind in ("stock", "native"))
    assert native.score.weight.shape == (5, native.config.hidden_size)
    assert 0 < native.score.weight.std() < 0.1
    with torch.no_grad():
        native.score.weight.copy_(stock.score.weight)
    inputs = _inputs(stock, "right")
    found, expected = (results(model, **inputs, output_hidden_states=True) for model in (native, stock))
    assert_equal(_of_tokens(found, inputs), _of_tokens(expected, inputs))
