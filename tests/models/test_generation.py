"""Generation is the stock model's, token by token, with every kind of cache; a step with the cache equals one without."""

import pytest
import torch
from models.comparison import FP32, cache_name, error, inputs_of
from models.families import CASES, CAUSAL, MAIN, ONE_PER_FAMILY, Case
from transformers import DynamicCache, StaticCache, set_seed

main_cases = pytest.mark.parametrize("case", MAIN, ids=str)
one_case = pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)

_MODES = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=1.3, top_k=20),
    "beams": dict(do_sample=False, num_beams=3, num_return_sequences=2),
    "sampled beams": dict(do_sample=True, num_beams=2),
    "static": dict(do_sample=False, cache_implementation="static"),
    "no cache": dict(do_sample=False, use_cache=False),
}


def _prompt(model, padded: bool) -> dict[str, torch.Tensor]:
    tokens = inputs_of(model, rows=3, length=6)["input_ids"]
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :3] = 0
        mask[2, :1] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}


def _generate(model, padded: bool = False, new: int = 10, **options):
    set_seed(0)
    return model.generate(
        **_prompt(model, padded),
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def _assert_same(actual, expected) -> None:
    assert torch.equal(actual.sequences, expected.sequences)
    assert len(actual.logits) == len(expected.logits)
    for found, right in zip(actual.logits, expected.logits):
        assert error(found, right) <= FP32


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left padded"])
@pytest.mark.parametrize("mode", _MODES)
@main_cases
def test_generate(case: Case, mode: str, padded: bool, pair):
    stock, native = pair(case)
    expected = _generate(stock, padded, **_MODES[mode])
    assert expected.sequences.shape[1] == 16
    _assert_same(_generate(native, padded, **_MODES[mode]), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_greedy_with_every_configuration(case: Case, pair):
    stock, native = pair(case)
    _assert_same(_generate(native, padded=True, new=5), _generate(stock, padded=True, new=5))


@one_case
def test_eager_attention(case: Case, pair):
    stock, native = pair(case, attn_implementation="eager")
    _assert_same(_generate(native, padded=True), _generate(stock, padded=True))


@one_case
def test_from_embeddings(case: Case, pair):
    found = []
    for model in pair(case):
        embeds = model.get_input_embeddings()(_prompt(model, False)["input_ids"])
        found.append(model.generate(inputs_embeds=embeds, max_new_tokens=6, do_sample=False, pad_token_id=0))
    assert torch.equal(found[1], found[0])


@one_case
def test_assisted(case: Case, build):
    """A draft model of the same kind proposes; what is accepted is the greedy text of the model itself."""
    stock, native = (build(kind, case) for kind in ("stock", "native"))
    draft = build("native", case)
    with torch.no_grad():
        draft.lm_head.weight.add_(0.05 * torch.randn(draft.lm_head.weight.shape, generator=torch.Generator().manual_seed(5)))
    tokens = inputs_of(stock, rows=1, length=6)["input_ids"]
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = stock.generate(tokens, **options)
    assert torch.equal(native.generate(tokens, assistant_model=draft, **options), expected)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@one_case
def test_between_training_steps(case: Case, checkpointed: bool, pair):
    """A training step, then generation in training mode, as a Trainer's callback does it; then training goes on."""
    stock, native = pair(case)
    for model in (stock.train(), native.train()):
        if checkpointed:
            model.gradient_checkpointing_enable()
    expected = _generate(stock)  # in the same state: in 5.20 a checkpointed layer in training drops its cache
    inputs = inputs_of(native)
    before = native(**inputs).loss
    before.backward()
    _assert_same(_generate(native), expected)
    native.zero_grad()
    after = native(**inputs)
    assert after.logits is None
    assert error(after.loss, before) <= FP32


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_steps_with_a_cache_equal_one_run_without(case: Case, kind: str, pair):
    """A prompt, a piece of four tokens and single tokens, against the stock class that sees all tokens at once."""
    stock, native = pair(case)
    tokens = inputs_of(stock, rows=2, length=15)["input_ids"]
    cache = DynamicCache(config=native.config) if kind == "dynamic" else StaticCache(config=native.config, max_cache_len=20)
    name, pieces, done = cache_name(native), [], 0
    with torch.no_grad():
        for size in (8, 4, 1, 1, 1):
            # A dynamic rope scales by the length so far: each piece is right by what was known when it ran.
            right = stock(input_ids=tokens[:, : done + size], use_cache=False).logits[:, done:]
            outputs = native(input_ids=tokens[:, done : done + size], use_cache=True, **{name: cache})
            done += size
            pieces.append((outputs.logits, right))
            assert outputs[name] is cache
            assert cache.get_seq_length() == done
    if case.options.get("rope_parameters", {}).get("rope_type") in ("dynamic", "longrope"):
        pieces = pieces[:1]  # cached keys keep the rotation of their time, in the stock class as well
    for found, right in pieces:
        assert error(found, right) <= FP32


@main_cases
def test_cache_holds_the_stock_keys_and_values(case: Case, pair):
    """Per layer, rotated keys and values of the stock head order: either model goes on from the other's cache."""
    stock, native = pair(case)
    tokens = inputs_of(stock)["input_ids"]
    name = cache_name(stock)
    assert cache_name(native) == name
    with torch.no_grad():
        caches = [model(input_ids=tokens, use_cache=True)[name] for model in (stock, native)]
        for right, found in zip(caches[0].layers, caches[1].layers, strict=True):
            assert error(found.keys, right.keys) <= FP32
            assert error(found.values, right.values) <= FP32
        following = tokens[:, :2]
        crossed = ((native, caches[0]), (stock, caches[1]))
        logits = [model(input_ids=following, use_cache=True, **{name: cache}).logits for model, cache in crossed]
    assert error(logits[0], logits[1]) <= FP32
