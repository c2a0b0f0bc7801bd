"""torch.compile of whole training steps without a graph break, and torch.export, as far as the stock class has them."""

import pytest
import torch
import torch._dynamo.testing
from models.comparison import FP32, assert_equal, error, inputs_of, results, stock_names
from models.families import ONE_PER_FAMILY, Case

from liger_models.layers.embedding import LigerEmbedding

one_case = pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compiled(model, backend: str):
    """The model with its forward compiled, so that parameters keep their names."""
    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend, dynamic=False)
    return model


def _short(case: Case) -> dict:
    """One layer of each kind: layers of one kind are alike, and each takes seconds to trace."""
    kinds = list(dict.fromkeys(getattr(case.configuration(), "layer_types", None) or []))
    return {"num_hidden_layers": len(kinds), "layer_types": kinds} if kinds else {"num_hidden_layers": 1}


@one_case
def test_compiled_forward_and_backward(case: Case, pair):
    """With logits: the path of evaluation. That of training is compiled below, by inductor."""
    stock, native = pair(case, saved_with=_short(case))
    names, inputs = stock_names(stock), inputs_of(stock)
    assert_equal(results(_compiled(native, "aot_eager"), names, **inputs), results(stock, names, **inputs))


@one_case
def test_inductor(case: Case, pair):
    stock, native = pair(case, saved_with={**_short(case), "tie_word_embeddings": True})
    names, inputs = stock_names(stock), inputs_of(stock)
    actual = results(_compiled(native.train(), "inductor"), names, **inputs)
    assert_equal(actual, results(stock, names, **inputs), without=("logits",))


def test_the_embeddings_scale_is_rounded_when_compiled_too():
    """59.87 is 59.75 in bf16: unrounded, the whole model sees other inputs."""
    embedding = LigerEmbedding(11, 16, scale=3584**0.5).bfloat16()
    tokens = torch.arange(11)
    with torch.no_grad():
        expected = embedding.weight.float() * torch.tensor(3584**0.5).bfloat16().float()
        assert torch.equal(embedding(tokens), expected.bfloat16())
        assert torch.equal(torch.compile(embedding, backend="inductor")(tokens), expected.bfloat16())


@one_case
def test_no_graph_breaks(case: Case, build):
    native = build("native", case).train()
    explained = torch._dynamo.explain(native)(**inputs_of(native))
    assert explained.graph_break_count == 0, explained.break_reasons
    assert explained.graph_count == 1


@one_case
def test_other_lengths_do_not_recompile_each_time(case: Case, build):
    """The second length makes sizes dynamic, and the third finds a graph, as with the stock class."""
    native = build("native", case, saved_with=_short(case)).train()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    model = torch.compile(native, fullgraph=True, backend=counter)
    for length in (11, 13, 17):
        inputs = inputs_of(native, length=length)
        assert error(model(**inputs).loss, native(**inputs).loss) <= FP32
    assert counter.frame_count <= 2


@one_case
def test_export(case: Case, pair):
    stock, native = pair(case)
    tokens = inputs_of(stock)["input_ids"]
    with torch.no_grad():
        exported = torch.export.export(native, (), {"input_ids": tokens, "use_cache": False}, strict=False)
        other = tokens.flip(1)
        outputs = exported.module()(input_ids=other, use_cache=False)
        assert error(outputs.logits, stock(input_ids=other).logits) <= FP32
