"""PEFT on the native Llama means what it means on the stock one: names, numbers, files, merges."""

import re

import pytest
import torch
import transformers.integrations.peft
from packaging.version import Version
from tiny_llama import (
    TOLERANCE,
    assert_close,
    assert_same_tensors,
    native_pair,
    read_tensors,
    save_stock,
    stock_class,
    token_batch,
)

peft = pytest.importorskip("peft")

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "seven": SEVEN,
    "all-linear": "all-linear",
    "q and v": ["q_proj", "v_proj"],
    "k": ["k_proj"],
    "up": ["up_proj"],
    "pattern": r".*layers\.1\.(self_attn\.(k|o)_proj|mlp\.gate_proj)",
    "head": ["q_proj", "lm_head"],
    "embedding": ["embed_tokens", "gate_proj"],
}
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
}
# The backward of two layers sums over up to 61 classes and 18 tokens.
GRADIENT_TOLERANCE = 4 * TOLERANCE


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_stock(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def biased_checkpoint(tmp_path_factory):
    return save_stock(tmp_path_factory.mktemp("llama_biases"), attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory):
    return save_stock(tmp_path_factory.mktemp("llama_tied"), tie_word_embeddings=True)


def lora(target="seven", **options) -> "peft.LoraConfig":
    names = TARGETS[target] if isinstance(target, str) else target
    return peft.LoraConfig(
        **{"r": 3, "lora_alpha": 5, "lora_dropout": 0.0, "task_type": "CAUSAL_LM", "target_modules": names, **options}
    )


def trainable(model) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def randomise_trainable(model) -> None:
    """Equal values for equal names: A is drawn anew for each model, and its zero B would hide it."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in sorted(trainable(model)):
            parameter = model.get_parameter(name)
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if re.search("lora_(embedding_)?[AB]", name) else parameter + noise)


def adapted_pair(folder, config, **load):
    """Stock and native under PEFT, with equal adapter weights, in training mode."""
    stock, native = (peft.get_peft_model(model, config) for model in native_pair(folder, **load))
    assert_trainable_names(native, stock)
    for model in (stock, native):
        randomise_trainable(model)
    return stock.train(), native.train()


def assert_trainable_names(native, stock) -> None:
    """The names that stock trains; where stock trains the biases of parts, native may train the packed ones."""
    assert [re.sub(r"\.base_layer", "", name) for name in sorted(trainable(native))] == [
        re.sub(r"\.base_layer", "", name) for name in sorted(trainable(stock))
    ]


def loss_of(model, ids=None):
    ids = token_batch() if ids is None else ids
    labels = ids.clone()
    labels[0, :3] = -100
    return model(input_ids=ids, labels=labels).loss


def assert_same_training(native, stock) -> None:
    losses = [loss_of(model) for model in (stock, native)]
    assert_close(losses[1], losses[0], what="loss")
    for loss in losses:
        loss.backward()
    expected = {name: parameter.grad for name, parameter in trainable(stock).items()}
    actual = {name: parameter.grad for name, parameter in trainable(native).items()}
    for name, gradient in expected.items():
        assert actual[name] is not None, f"no gradient for {name}"
        assert gradient.any(), f"{name}: the stock gradient is zero and shows nothing"
        assert_close(actual[name], gradient, GRADIENT_TOLERANCE, f"gradient of {name}")
    assert all(p.grad is None for p in native.parameters() if not p.requires_grad)


@pytest.mark.parametrize("target", TARGETS)
def test_targets(checkpoint, target):
    stock, native = adapted_pair(checkpoint, lora(target))
    assert_same_training(native, stock)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("target", ["seven", "q and v"])
def test_kinds(biased_checkpoint, kind, target):
    stock, native = adapted_pair(biased_checkpoint, lora(target, **KINDS[kind]))
    assert_same_training(native, stock)


@pytest.mark.parametrize("kind", ["bias", "all biases"])
def test_trained_biases(biased_checkpoint, kind):
    """Biases of packed projections belong to one parameter. Either they train as in stock or PEFT's request is refused."""
    config = lora("seven", **KINDS[kind])
    stock, native = native_pair(biased_checkpoint)
    stock = peft.get_peft_model(stock, config)
    try:
        native = peft.get_peft_model(native, config)
    except (ValueError, NotImplementedError, RuntimeError) as refusal:
        assert "bias" in str(refusal)
        return
    for model in (stock, native):
        loss_of(model.train()).backward()
    wanted = {n for n, p in trainable(stock).items() if n.endswith("bias") and p.grad.any()}
    trained = sum(p.grad.count_nonzero().item() for n, p in trainable(native).items() if n.endswith("bias"))
    assert trained == sum(stock.get_parameter(name).grad.count_nonzero().item() for name in wanted)


def test_usual_names_train_all_seven(checkpoint):
    """The packed prototype trained o_proj and down_proj only, without a word."""
    _, native = native_pair(checkpoint)
    native = peft.get_peft_model(native, lora("seven"))
    found = {name.split(".lora_")[0].rpartition(".")[2] for name in trainable(native)}
    assert found == set(SEVEN)
    assert len(trainable(native)) == 2 * 7 * 2


def test_packed_names_are_not_adapted_twice(checkpoint):
    _, native = native_pair(checkpoint)
    native = peft.get_peft_model(native, lora("all-linear"))
    assert not any("qkv_proj" in name or "gate_up_proj" in name for name in trainable(native))


def test_targeting_a_packed_name_adapts_it_or_is_refused(checkpoint):
    _, native = native_pair(checkpoint)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=r"qkv_proj|PackedLinear"):
        peft.get_peft_model(native, lora(["qkv_proj"]))


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("direction", ["native to stock", "stock to native"])
def test_adapter_files(tmp_path, checkpoint, direction, kind):
    stock, native = adapted_pair(checkpoint, lora("seven", **KINDS[kind]))
    stock.save_pretrained(tmp_path / "stock")
    native.save_pretrained(tmp_path / "native")
    files = [read_adapter(tmp_path / name) for name in ("stock", "native")]
    if kind == "dora":
        # magnitudes are row norms of the weights, moved by equal amounts: one kernel, one value
        assert sorted(files[0]) == sorted(files[1])
    assert_same_tensors(files[1], files[0])
    fresh_stock, fresh_native = native_pair(checkpoint)
    source, fresh, expected = (
        ("native", fresh_stock, stock) if direction == "native to stock" else ("stock", fresh_native, native)
    )
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / source).eval()
    ids = token_batch()
    with torch.no_grad():
        assert_close(loaded(input_ids=ids).logits, expected.eval()(input_ids=ids).logits)
    again = {n: p for n, p in loaded.named_parameters() if "lora_" in n}
    assert_same_tensors(again, dict(trainable(expected)))


def read_adapter(folder) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("target", ["seven", "q and v", "head"])
def test_merged_export(tmp_path, biased_checkpoint, kind, target):
    """merge_and_unload, then save: stock's merged checkpoint. DoRA's merge replaces weights: right or refused."""
    stock, native = adapted_pair(biased_checkpoint, lora(target, **KINDS[kind]))
    stock.merge_and_unload().save_pretrained(tmp_path / "stock")
    expected = read_tensors(tmp_path / "stock")
    try:
        merged = native.merge_and_unload()
    except (ValueError, NotImplementedError, RuntimeError) as refusal:
        assert kind == "dora" and re.search(r"(?i)dora|merge", str(refusal)), refusal
        return
    merged.save_pretrained(tmp_path / "native")
    actual = read_tensors(tmp_path / "native")
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, what=name)
    original = read_tensors(biased_checkpoint)
    assert not torch.equal(actual["model.layers.0.self_attn.q_proj.weight"], original["model.layers.0.self_attn.q_proj.weight"])
    ids = token_batch()
    reloaded = stock_class("causal").from_pretrained(tmp_path / "native")
    with torch.no_grad():
        assert_close(merged.eval()(ids).logits, reloaded(ids).logits, what="logits of the merged model")
    assert not any("lora" in name for name, _ in merged.named_modules())


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merge_in_place_and_unmerge(biased_checkpoint, kind):
    stock, native = adapted_pair(biased_checkpoint, lora("seven", **KINDS[kind]))
    ids = token_batch()
    with torch.no_grad():
        expected = stock.eval()(input_ids=ids).logits
        try:
            native.eval().merge_adapter()
        except (ValueError, NotImplementedError, RuntimeError) as refusal:
            assert kind == "dora" and re.search(r"(?i)dora|merge", str(refusal)), refusal
            return
        # merging rounds the sum of two weights once more
        assert_close(native(input_ids=ids).logits, expected, 4 * TOLERANCE, "merged")
        native.unmerge_adapter()
        assert_close(native(input_ids=ids).logits, expected, 4 * TOLERANCE, "unmerged")


def test_unload_gives_the_base_back(tmp_path, checkpoint):
    _, native = adapted_pair(checkpoint, lora("seven"))
    native.unload().save_pretrained(tmp_path / "out")
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(checkpoint))


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
def test_modules_to_save(tmp_path, checkpoint, saved):
    stock, native = adapted_pair(checkpoint, lora("seven", modules_to_save=saved))
    assert_same_training(native, stock)
    stock.save_pretrained(tmp_path / "stock")
    native.save_pretrained(tmp_path / "native")
    assert_same_tensors(read_adapter(tmp_path / "native"), read_adapter(tmp_path / "stock"))
    stock.merge_and_unload().save_pretrained(tmp_path / "merged_stock")
    native.merge_and_unload().save_pretrained(tmp_path / "merged_native")
    actual, expected = read_tensors(tmp_path / "merged_native"), read_tensors(tmp_path / "merged_stock")
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, what=name)


@pytest.mark.parametrize("option", [{"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}, {}])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tied_weights(tied_checkpoint, option):
    stock, native = adapted_pair(tied_checkpoint, lora("seven", **option))
    assert_same_training(native, stock)


def test_adapted_head_trains_through_the_loss(checkpoint):
    """An adapter on lm_head changes the loss in training, not only the logits in evaluation."""
    stock, native = adapted_pair(checkpoint, lora(["lm_head"]))
    with torch.no_grad(), native.disable_adapter():
        base = loss_of(native)
    assert abs(loss_of(native).item() - base.item()) > 1e-3
    assert_same_training(native, stock)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(checkpoint, reentrant):
    stock, native = adapted_pair(checkpoint, lora("seven"))
    for model in (stock, native):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    assert native.base_model.model.model.gradient_checkpointing or any(
        getattr(layer, "gradient_checkpointing", False) for layer in native.base_model.model.model.layers
    )
    assert_same_training(native, stock)


@pytest.mark.parametrize("return_dict", [True, False, None])
def test_return_dict(checkpoint, return_dict):
    """O2: the argument reaches forward through PEFT and not the loss."""
    stock, native = adapted_pair(checkpoint, lora("seven"))
    ids = token_batch()
    expected, actual = (m.eval()(input_ids=ids, labels=ids, return_dict=return_dict) for m in (stock, native))
    assert isinstance(actual, tuple) == (return_dict is False)
    assert_close(actual[0], expected[0], what="loss")
    assert_close(actual[1], expected[1], what="logits")


def test_disabled_adapter_is_the_base(checkpoint):
    base, native = native_pair(checkpoint)
    native = peft.get_peft_model(native, lora("seven"))
    randomise_trainable(native)
    ids = token_batch()
    with torch.no_grad():
        adapted = native.eval()(input_ids=ids).logits
        with native.disable_adapter():
            assert_close(native(input_ids=ids).logits, base(ids).logits)
        assert (adapted - base(ids).logits).abs().max() > 1e-2
        assert torch.equal(native(input_ids=ids).logits, adapted)


@pytest.mark.parametrize("target", ["seven", "k", "up"])
def test_generation(checkpoint, target):
    stock, native = adapted_pair(checkpoint, lora(target))
    ids = token_batch(2, 6)
    expected, actual = (
        m.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        for m in (stock, native)
    )
    assert torch.equal(actual, expected)


def test_two_adapters_are_switched_and_added(checkpoint):
    stock, native = native_pair(checkpoint)
    models = []
    for model in (stock, native):
        model = peft.get_peft_model(model, lora("q and v"), adapter_name="first")
        randomise_trainable(model)
        model.add_adapter("second", lora("up"))
        model.set_adapter("second")
        randomise_trainable(model)
        models.append(model.eval())
    ids = token_batch()
    with torch.no_grad():
        for name in ("first", "second", "first"):
            for model in models:
                model.set_adapter(name)
            assert_close(models[1](input_ids=ids).logits, models[0](input_ids=ids).logits, what=name)


def test_adapters_of_transformers_itself(tmp_path, checkpoint):
    """model.add_adapter and load_adapter, without PeftModel."""
    if Version(peft.__version__) < Version(transformers.integrations.peft.MIN_PEFT_VERSION):
        pytest.skip("the installed transformers wants a newer PEFT for this")
    stock, native = native_pair(checkpoint)
    ids = token_batch()
    for model in (stock, native):
        model.add_adapter(lora("seven"))
        randomise_trainable(model)
    native.save_pretrained(tmp_path / "native")
    stock.save_pretrained(tmp_path / "stock")
    assert_same_tensors(read_adapter(tmp_path / "native"), read_adapter(tmp_path / "stock"))
    fresh, _ = native_pair(checkpoint)
    fresh.load_adapter(str(tmp_path / "native"))
    with torch.no_grad():
        assert_close(native.eval()(ids).logits, stock.eval()(ids).logits)
        assert_close(fresh.eval()(ids).logits, stock(ids).logits)


def test_bfloat16(checkpoint):
    """Adapters in fp32 over weights in bf16, PEFT's default."""
    stock, native = adapted_pair(checkpoint, lora("seven"), dtype=torch.bfloat16)
    assert {p.dtype for p in trainable(native).values()} == {p.dtype for p in trainable(stock).values()}
    # two layers round some ten times each to half a spacing, and the loss averages over tokens
    assert_close(loss_of(native), loss_of(stock), 16 * torch.finfo(torch.bfloat16).eps)


def test_a_training_step_leaves_the_base_alone(tmp_path, checkpoint):
    _, native = adapted_pair(checkpoint, lora("seven"))
    optimizer = torch.optim.AdamW(native.parameters(), lr=0.1, weight_decay=0.1)
    loss_of(native).backward()
    optimizer.step()
    native.unload().save_pretrained(tmp_path / "out")
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(checkpoint))
