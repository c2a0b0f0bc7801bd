"""Every family on a CUDA device: Triton's kernels inside whole models, against the stock class on the same device.

What the tests on CPU run on the torch reference. Run by hand: `make test-gpu`.
"""

import pytest
import torch
from models.comparison import FP32, assert_as_exact, assert_equal, error, inputs_of, results, stock_names
from models.families import ONE_PER_FAMILY, Case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]
every_family = pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """fp32 products in fp32: TensorFloat-32 has ten bits."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def _on_gpu(inputs: dict) -> dict:
    return {name: tensor.cuda() for name, tensor in inputs.items()}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@every_family
def test_every_tensor_fp32(case: Case, training: bool, pair):
    stock, native = (model.cuda().train(training) for model in pair(case))
    names, inputs = stock_names(stock), _on_gpu(inputs_of(stock))
    expected = results(stock, names, **inputs, output_hidden_states=True)
    actual = results(native, names, **inputs, output_hidden_states=True)
    # Twice the tolerance of CPU: libraries and kernels split their sums differently.
    assert_equal(actual, expected, tolerance=2 * FP32, without=("logits",) if training else ())


@every_family
def test_training_in_bf16(case: Case, pair, build):
    """As near to fp64 as the stock class; the factor and the floor are those of the same test on CPU."""
    options = dict(dtype=torch.bfloat16, saved_with=case.without_routing())
    models = [*reversed(pair(case, **options)), build("stock", case, **options).double()]
    names, found = stock_names(models[1]), []
    for seed in range(6):
        inputs = _on_gpu(inputs_of(models[1], rows=3, length=20, seed=seed))
        found.append([results(model.cuda().train(), names, **inputs) for model in models])
    assert_as_exact(found, factor=1.5, floor=2.0**-8)


@every_family
def test_compiled_training_in_one_graph(case: Case, build):
    native = build("native", case).cuda().train()
    names, inputs = stock_names(build("stock", case)), _on_gpu(inputs_of(native))
    expected = results(native, names, **inputs)
    torch._dynamo.reset()
    native.forward = torch.compile(native.forward, fullgraph=True, dynamic=False)
    assert_equal(results(native, names, **inputs), expected, tolerance=2 * FP32)


@every_family
def test_generation_with_padding(case: Case, pair):
    stock, native = (model.cuda() for model in pair(case))
    tokens = inputs_of(stock, 2, 9)["input_ids"].cuda()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(native.generate(tokens, **options), stock.generate(tokens, **options))


@every_family
def test_loaded_onto_the_device(case: Case, build, checkpoint):
    """With device_map, the conversions run there: the same bits as loaded on CPU."""
    loaded = case.family.native("causal_lm").from_pretrained(checkpoint(case), device_map="cuda")
    for (name, one), other in zip(loaded.named_parameters(), build("native", case).parameters()):
        assert one.is_cuda and torch.equal(one.cpu(), other), name
    inputs = inputs_of(loaded)
    assert error(loaded(**_on_gpu(inputs)).loss.cpu(), build("native", case)(**inputs).loss) <= 2 * FP32
