"""AutoModel registration: what it changes, for how long, and what stands there afterwards."""

import pytest
import torch
import transformers
from tiny_llama import assert_close, native_class, save_stock, stock_class, tiny_config, token_batch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

from liger_models import LigerAutoModelForCausalLM, register_auto_models, unregister_auto_models

AUTO = {"causal": AutoModelForCausalLM, "classification": AutoModelForSequenceClassification}


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Each test leaves the Auto classes as it found them."""
    mappings = [auto._model_mapping._extra_content for auto in (AutoModel, *AUTO.values())]
    before = [dict(mapping) for mapping in mappings]
    yield
    assert [dict(mapping) for mapping in mappings] == before


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auto")
    return {head: save_stock(folder / head, head) for head in ("base", "causal", "classification")}


def built(head: str = "causal") -> type:
    return type(AUTO[head].from_config(tiny_config()))


def registered() -> bool:
    classes = {built(head) is native_class(head) for head in AUTO}
    assert len(classes) == 1, "only some of the Auto classes are registered"
    return classes.pop()


def test_context_manager():
    assert not registered()
    with register_auto_models():
        assert registered()
    assert not registered()


def test_plain_call():
    register_auto_models()
    assert registered()
    unregister_auto_models()
    assert not registered()


def test_undone_after_an_exception():
    with pytest.raises(KeyError, match="inside"), register_auto_models():
        raise KeyError("inside")
    assert not registered()


def test_nested():
    with register_auto_models():
        with register_auto_models():
            assert registered()
        assert registered()
    assert not registered()


def test_block_inside_a_plain_call():
    register_auto_models()
    with register_auto_models():
        assert registered()
    assert registered()
    unregister_auto_models()
    assert not registered()


def test_plain_call_twice_and_undo_without_one():
    unregister_auto_models()
    register_auto_models()
    register_auto_models()
    unregister_auto_models()
    unregister_auto_models()
    unregister_auto_models()
    assert not registered()


def test_undo_inside_the_block():
    """The end of the block finds nothing to undo, and takes nothing else away."""
    with register_auto_models():
        unregister_auto_models()
        assert not registered()
    assert not registered()


def test_undo_inside_the_block_leaves_the_outer_registration():
    register_auto_models()
    with register_auto_models():
        unregister_auto_models()
    assert registered(), "the end of the block undid a registration that it had not made"
    unregister_auto_models()
    assert not registered()


def test_handle_of_a_plain_call_ends_once():
    handle = register_auto_models()
    with handle:
        assert registered()
    assert not registered()


class OwnLlama(LlamaForCausalLM):
    """A user's own class."""


def test_user_s_own_registration_returns():
    AutoModelForCausalLM.register(LlamaConfig, OwnLlama, exist_ok=True)
    try:
        with register_auto_models():
            assert built() is native_class("causal")
        assert built() is OwnLlama
    finally:
        AutoModelForCausalLM._model_mapping._extra_content.pop(LlamaConfig)


def test_user_s_registration_during_the_block_survives():
    """Who registers later knows what he does: it is not ours to undo."""
    try:
        with register_auto_models():
            AutoModelForCausalLM.register(LlamaConfig, OwnLlama, exist_ok=True)
        assert built() is OwnLlama
    finally:
        AutoModelForCausalLM._model_mapping._extra_content.pop(LlamaConfig, None)


@pytest.mark.parametrize("head", AUTO)
def test_from_pretrained(checkpoints, head):
    ids = token_batch()
    stock = AUTO[head].from_pretrained(checkpoints[head])
    assert type(stock) is stock_class(head)
    with register_auto_models():
        native = AUTO[head].from_pretrained(checkpoints[head])
    assert type(native) is native_class(head)
    with torch.no_grad():
        assert_close(native(ids).logits, stock(ids).logits)


def test_models_outlive_the_registration(tmp_path, checkpoints):
    with register_auto_models():
        model = AutoModelForCausalLM.from_pretrained(checkpoints["causal"])
    model.save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LlamaForCausalLM


def test_other_families_are_untouched():
    with register_auto_models():
        config = GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1, n_positions=8)
        assert type(AutoModelForCausalLM.from_config(config)) is transformers.GPT2LMHeadModel


def test_stock_classifier_is_not_a_mixture(checkpoints):
    """Trap 7: the stock heads ask AutoModel for their base model."""
    ids = token_batch()
    expected = LlamaForSequenceClassification.from_pretrained(checkpoints["classification"])
    with register_auto_models():
        model = LlamaForSequenceClassification(tiny_config())
        assert type(model.model) is LlamaModel
        loaded, info = LlamaForSequenceClassification.from_pretrained(checkpoints["classification"], output_loading_info=True)
        assert type(AutoModel.from_config(tiny_config())) is LlamaModel
    assert type(loaded.model) is LlamaModel
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("active", [False, True])
def test_native_classifier_is_not_a_mixture(active):
    if active:
        with register_auto_models():
            model = native_class("classification")(tiny_config())
    else:
        model = native_class("classification")(tiny_config())
    assert type(model.model) is native_class("base")


def test_pipeline_follows(tmp_path, checkpoints):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{number}": number for number in range(61)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2", unk_token="w3")
    path = str(checkpoints["causal"])
    options = {"tokenizer": wrapped, "max_new_tokens": 6, "do_sample": False, "device": "cpu"}

    def text(expected: type) -> str:
        options_now = dict(options)
        pipeline = transformers.pipeline(
            "text-generation", model=path, tokenizer=options_now.pop("tokenizer"), device=options_now.pop("device")
        )
        assert type(pipeline.model) is expected
        return pipeline("w5 w6 w7", **options_now)[0]["generated_text"]

    stock = text(LlamaForCausalLM)
    with register_auto_models():
        assert text(native_class("causal")) == stock
    assert stock.startswith("w5 w6 w7") and len(stock) > len("w5 w6 w7")


def test_liger_auto_from_pretrained(checkpoints):
    model = LigerAutoModelForCausalLM.from_pretrained(checkpoints["causal"], dtype=torch.bfloat16)
    assert type(model) is native_class("causal")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not registered()


def test_liger_auto_with_a_configuration(checkpoints):
    config = LlamaConfig.from_pretrained(checkpoints["causal"])
    model = LigerAutoModelForCausalLM.from_pretrained(checkpoints["causal"], config=config)
    assert type(model) is native_class("causal")


def test_liger_auto_takes_configuration_values_as_auto_does(checkpoints):
    """Unknown keyword arguments override the configuration's values."""
    expected = AutoModelForCausalLM.from_pretrained(checkpoints["causal"], rms_norm_eps=0.5)
    model = LigerAutoModelForCausalLM.from_pretrained(checkpoints["causal"], rms_norm_eps=0.5)
    assert model.config.rms_norm_eps == expected.config.rms_norm_eps == 0.5
    ids = token_batch()
    with torch.no_grad():
        assert_close(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.bfloat16}, {"torch_dtype": torch.bfloat16}, {"dtype": "float16"}, {"attn_implementation": "eager"}],
)
def test_liger_auto_from_config(options):
    """O60."""
    expected = AutoModelForCausalLM.from_config(tiny_config(), **options)
    model = LigerAutoModelForCausalLM.from_config(tiny_config(), **options)
    assert type(model) is native_class("causal")
    assert model.dtype == expected.dtype
    assert model.config._attn_implementation == expected.config._attn_implementation


def test_unsupported_type(tmp_path):
    """O60: not KeyError 'gpt2', but what there is."""
    config = GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    with pytest.raises(ValueError, match=r"gpt2.*llama"):
        LigerAutoModelForCausalLM.from_config(config)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"gpt2.*llama"):
        LigerAutoModelForCausalLM.from_pretrained(tmp_path)


def test_not_instantiated():
    with pytest.raises((TypeError, OSError), match="from_pretrained"):
        LigerAutoModelForCausalLM()
