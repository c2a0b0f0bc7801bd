"""What the causal LM does with labels: loss and logits in training and evaluation, and every keyword that shapes them."""

import pytest
import torch
from models.comparison import FP32, assert_equal, error, inputs_of, results, stock_gradients, stock_names
from models.families import HEADS, ONE_PER_HEAD, Case
from torch import nn

both_modes = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
main_cases = pytest.mark.parametrize("case", HEADS, ids=str)
one_case = pytest.mark.parametrize("case", ONE_PER_HEAD, ids=str)


@main_cases
def test_logits_by_mode(case: Case, pair):
    """Training makes logits on request only, evaluation unless told otherwise; the loss never depends on it."""
    stock, native = pair(case)
    inputs = inputs_of(stock)
    expected = stock(**inputs)
    asked = {
        (True, None): {},
        (True, True): {"return_logits": True},
        (True, False): {"return_logits": False},
        (False, None): {},
        (False, True): {"return_logits": True},
        (False, False): {"return_logits": False},
    }
    for (training, wanted), options in asked.items():
        opposite = {} if wanted is None else {"skip_logits": not wanted}
        for keywords in (options, opposite):
            outputs = native.train(training)(**inputs, **keywords)
            assert error(outputs.loss, expected.loss) <= FP32
            if (not training) if wanted is None else wanted:
                assert error(outputs.logits, expected.logits) <= FP32
            else:
                assert outputs.logits is None
    outputs = native.train()(input_ids=inputs["input_ids"])
    assert outputs.loss is None
    assert error(outputs.logits, expected.logits) <= FP32


@both_modes
@main_cases
def test_gradients_with_and_without_logits(case: Case, training: bool, pair):
    """The path without logits gives, in both modes, the gradients of the path with them."""
    stock, native = pair(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    expected = results(stock, names, **inputs)
    native.train(training)
    assert_equal(results(native, names, **inputs, skip_logits=True), expected, without=("logits",))
    assert_equal(results(native, names, **inputs, skip_logits=False), expected)


@pytest.mark.parametrize("count", [7, torch.tensor(7), torch.tensor(7.0), torch.tensor([7])], ids=repr)
@both_modes
@one_case
def test_num_items_in_batch(case: Case, training: bool, count, pair):
    """The sum over tokens is divided by the number that the Trainer counted over all accumulation steps."""
    stock, native = pair(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    stock.train(training), native.train(training)
    loss = stock(**inputs, num_items_in_batch=count).loss
    loss.sum().backward()
    outputs = native(**inputs, num_items_in_batch=count)
    outputs.loss.sum().backward()
    assert outputs.loss.numel() == 1
    assert error(outputs.loss.reshape(()), loss.reshape(())) <= FP32
    assert_equal(stock_gradients(native, names), stock_gradients(stock, names))


@both_modes
@one_case
def test_ignore_index(case: Case, training: bool, pair):
    stock, native = pair(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] == -100, 5)
    stock.train(training), native.train(training)
    expected = results(stock, names, **inputs, ignore_index=5)
    assert error(expected["loss"], results(stock, **inputs)["loss"]) > 1e-3
    assert_equal(results(native, names, **inputs, ignore_index=5), expected, without=("logits",) if training else ())


@pytest.mark.parametrize("labels", ["ignored", "none"])
@both_modes
@one_case
def test_shift_labels(case: Case, training: bool, labels: str, pair):
    """Labels that are shifted already are used as they are, whatever `labels` says, and alone as well."""
    stock, native = pair(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    shifted = nn.functional.pad(inputs["labels"], (0, 1), value=7)[:, 1:].contiguous()
    shifted[:, 6] = -100
    ignored = torch.full_like(shifted, -100)
    stock.train(training), native.train(training)
    expected = results(stock, names, input_ids=inputs["input_ids"], labels=ignored, shift_labels=shifted)
    given = {"labels": ignored} if labels == "ignored" else {}
    actual = results(native, names, input_ids=inputs["input_ids"], shift_labels=shifted, **given)
    assert_equal(actual, expected, without=("logits",) if training else ())


_KEPT = [4, torch.tensor([2, 5, 6, 11])]


@pytest.mark.parametrize("kept", _KEPT, ids=["number", "index"])
@both_modes
@one_case
def test_logits_to_keep(case: Case, training: bool, kept, pair):
    """As the stock class: labels, or shifted labels, belong to the rows that are kept."""
    stock, native = pair(case)
    names, tokens = stock_names(stock), inputs_of(stock)["input_ids"]
    labels = torch.randint(3, stock.config.vocab_size, (2, 4), generator=torch.Generator().manual_seed(3))
    stock.train(training), native.train(training)
    outputs = native(input_ids=tokens, logits_to_keep=kept)
    assert outputs.logits.shape == (2, 4, stock.config.vocab_size)
    assert error(outputs.logits, stock(input_ids=tokens, logits_to_keep=kept).logits) <= FP32
    for options in ({"labels": labels}, {"labels": labels, "shift_labels": labels.flip(1)}):
        expected = results(stock, names, input_ids=tokens, logits_to_keep=kept, **options)
        actual = results(native, names, input_ids=tokens, logits_to_keep=kept, **options)
        assert_equal(actual, expected, without=("logits",) if training else ())


@pytest.mark.parametrize("kept", _KEPT, ids=["number", "index"])
@both_modes
@one_case
def test_logits_to_keep_with_labels_of_all_rows(case: Case, training: bool, kept, pair):
    """The stock class cannot do this: the loss is over the kept rows, each of which predicts its next token."""
    stock, native = pair(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    next_labels = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    rows = slice(-kept, None) if isinstance(kept, int) else kept
    expected = results(
        stock,
        names,
        input_ids=inputs["input_ids"],
        logits_to_keep=kept,
        labels=next_labels[:, rows],
        shift_labels=next_labels[:, rows].contiguous(),
    )
    actual = results(native.train(training), names, **inputs, logits_to_keep=kept)
    assert_equal(actual, expected, without=("logits",) if training else ())


@pytest.mark.parametrize("skipped", [True, False], ids=["without logits", "with logits"])
@both_modes
@main_cases
def test_token_accuracy_and_predicted_tokens(case: Case, training: bool, skipped: bool, pair):
    """Accuracy over the tokens that have a label; the prediction for each, -100 where there is none."""
    stock, native = pair(case)
    inputs = inputs_of(stock)
    prediction = stock(**inputs).logits.argmax(-1)
    inputs["labels"][1, 4:9] = prediction[1, 3:8]  # some right ones
    shifted = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    labelled = shifted != -100
    accuracy = (prediction == shifted)[labelled].double().mean()
    assert 0.1 < accuracy < 0.9
    outputs = native.train(training)(**inputs, return_token_accuracy=True, return_predicted_tokens=True, skip_logits=skipped)
    assert (outputs.logits is None) == skipped
    assert abs(float(outputs.token_accuracy) - float(accuracy)) <= 2.0**-23
    assert torch.equal(outputs.predicted_tokens, prediction.masked_fill(~labelled, -100))
    assert error(outputs.loss, stock(**inputs).loss) <= FP32
    outputs = native(**inputs)
    assert outputs.get("token_accuracy") is None
    assert outputs.get("predicted_tokens") is None


@pytest.mark.parametrize("counted", [False, True], ids=["mean", "counted"])
@both_modes
@one_case
def test_all_labels_ignored(case: Case, training: bool, counted: bool, pair):
    """The mean over no token is NaN in the stock class and NaN or zero here; gradients are zero or absent, never NaN."""
    stock, native = pair(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    inputs["labels"].fill_(-100)
    options = {"num_items_in_batch": 8} if counted else {}
    expected = stock(**inputs, **options).loss
    outputs = native.train(training)(**inputs, **options, return_token_accuracy=True)
    if counted:
        assert expected == 0
        assert outputs.loss == 0
    else:
        assert expected.isnan()
        assert outputs.loss == 0 or outputs.loss.isnan()
    assert outputs.token_accuracy is None or not torch.as_tensor(outputs.token_accuracy).isnan()
    if outputs.loss.requires_grad:
        outputs.loss.backward()
    wrong = [name for name, g in stock_gradients(native, names).items() if g is not None and torch.count_nonzero(g)]
    assert not wrong


@both_modes
@one_case
def test_loss_is_an_ordinary_differentiable_number(case: Case, training: bool, pair):
    """Scaled, summed with another batch's, and accumulated over two backwards, as any loss can be."""
    stock, native = pair(case)
    names = stock_names(stock)
    first, second = inputs_of(stock), inputs_of(stock, rows=3, length=7, seed=4)
    for model in (stock.train(training), native.train(training)):
        model.zero_grad()
        (3 * model(**first).loss - 0.5 * model(**second).loss).backward()
        model(**second).loss.div(7).backward()
    assert_equal(stock_gradients(native, names), stock_gradients(stock, names))


@both_modes
@one_case
def test_loss_without_gradients(case: Case, training: bool, pair):
    stock, native = pair(case)
    inputs = inputs_of(stock)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            outputs = native.train(training)(**inputs)
            assert not outputs.loss.requires_grad
            assert error(outputs.loss, stock(**inputs).loss) <= FP32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@both_modes
@one_case
def test_dtypes_of_loss_and_logits(case: Case, training: bool, dtype, pair):
    stock, native = pair(case, dtype=dtype)
    inputs = inputs_of(stock)
    expected, outputs = stock(**inputs), native.train(training)(**inputs, return_logits=True)
    assert (outputs.loss.dtype, outputs.logits.dtype) == (expected.loss.dtype, expected.logits.dtype)


@both_modes
@one_case
def test_return_dict(case: Case, training: bool, pair):
    stock, native = pair(case)
    inputs = inputs_of(stock)
    expected = stock(**inputs, use_cache=False, return_dict=False)
    native.train(training)
    outputs = native(**inputs, use_cache=False, return_dict=False, return_logits=True)
    assert isinstance(outputs, tuple)
    assert len(outputs) == len(expected) == 2
    assert error(outputs[0], expected[0]) <= FP32
    assert error(outputs[1], expected[1]) <= FP32
    assert error(native(**inputs, return_dict=False)[0], expected[0]) <= FP32
    assert error(native(**inputs, return_dict=True).loss, expected[0]) <= FP32


@pytest.mark.parametrize(
    "unknown",
    [{"cache_position": torch.arange(13)}, {"num_logits_to_keep": 0}, {"token_type_ids": None}, {"use_cache": False}],
    ids=lambda keywords: next(iter(keywords)),
)
@both_modes
@one_case
def test_keywords_of_other_versions_are_accepted(case: Case, training: bool, unknown: dict, pair):
    stock, native = pair(case)
    names, inputs = stock_names(stock), inputs_of(stock)
    expected = results(stock, names, **inputs)
    actual = results(native.train(training), names, **inputs, **unknown)
    assert_equal(actual, expected, without=("logits",) if training else ())


class _Doubled(nn.Module):
    """A head that is more than its weight, as an adapter is."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.head = head
        self.weight = head.weight

    def forward(self, x):
        return 2 * self.head(x)


@pytest.mark.parametrize("change", ["bias", "wrapped", "hook", "pre-hook"])
@both_modes
@one_case
def test_a_head_that_is_no_plain_linear(case: Case, training: bool, change: str, pair):
    """The fused loss reads the head's weight: it must not pass by a bias, a wrapper or a hook."""
    found = []
    for model in pair(case):
        head = model.lm_head
        if change == "bias":
            head.bias = nn.Parameter(torch.linspace(-2, 2, head.out_features))
        elif change == "wrapped":
            model.lm_head = _Doubled(head)
        elif change == "hook":
            head.register_forward_hook(lambda module, arguments, output: output * 2)
        else:
            head.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 2,))
        inputs = inputs_of(model)
        outputs = model.train(training)(**inputs)
        outputs.loss.backward()
        gradients = {"input": model.get_input_embeddings().weight.grad, "head": head.weight.grad}
        if change == "bias":
            gradients["bias"] = head.bias.grad
        found.append({"loss": outputs.loss.detach(), **gradients})
    assert_equal(found[1], found[0])


@one_case
def test_a_custom_loss_function(case: Case, pair):
    """`model.loss_function = …` is the stock way to another loss: it receives the logits, in training too."""
    found = []
    for model in pair(case):
        model.loss_function = lambda logits, labels, vocab_size, **options: logits.square().mean()
        outputs = model.train()(**inputs_of(model))
        outputs.loss.backward()
        found.append({"loss": outputs.loss.detach(), "gradient": model.get_input_embeddings().weight.grad})
    assert_equal(found[1], found[0])
