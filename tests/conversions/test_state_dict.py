"""load_state_dict of stock and packed keys, and what loading must not lose (rope buffers, views, ties)."""

import copy
import pickle
import re

import pytest
import torch
from tiny_llama import (
    CASES,
    assert_close,
    assert_same_tensors,
    export,
    native_class,
    native_pair,
    randomise,
    read_tensors,
    save_stock,
    stock_class,
    tiny_config,
    token_batch,
)

STOCK_CASES = ["gqa", "one_kv_head", "all_biases", "tied", "head_dim"]


def other_native(case: str):
    """A native model with other weights than any checkpoint of these tests."""
    return randomise(native_class("causal")(tiny_config(**CASES[case])), seed=9)


def stock_state(case: str) -> dict[str, torch.Tensor]:
    return dict(randomise(stock_class("causal")(tiny_config(**CASES[case]))).state_dict())


def stored(state: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    """What of a stock state dict a checkpoint stores."""
    return {name: tensor for name, tensor in state.items() if case != "tied" or name != "lm_head.weight"}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("case", STOCK_CASES)
def test_stock_state_dict(tmp_path, case, strict, assign):
    model, state = other_native(case), stock_state(case)
    result = model.load_state_dict(dict(state), strict=strict, assign=assign)
    assert result.missing_keys == [] and result.unexpected_keys == []
    assert_same_tensors(export(model, tmp_path), stored(state, case))
    expected = randomise(stock_class("causal")(tiny_config(**CASES[case])))
    ids = token_batch()
    with torch.no_grad():
        assert_close(model(ids).logits, expected(ids).logits)


def test_caller_s_state_dict_is_not_changed():
    state = stock_state("all_biases")
    before = {name: tensor.clone() for name, tensor in state.items()}
    other_native("all_biases").load_state_dict(state, strict=False)
    assert_same_tensors(state, before)


def test_tied_checkpoint_without_the_head(tmp_path):
    """What the Trainer passes: the tensors as stored, the tied head absent."""
    model, state = other_native("tied"), stored(stock_state("tied"), "tied")
    result = model.load_state_dict(state, strict=False)
    assert set(result.missing_keys) <= {"lm_head.weight"} and result.unexpected_keys == []
    assert_same_tensors(export(model, tmp_path), state)


@pytest.mark.parametrize("case", ["gqa", "all_biases"])
def test_one_key_at_a_time(tmp_path, case):
    """Shards of one tensor each, q, k and v apart."""
    model, state = other_native(case), stock_state(case)
    for name, tensor in state.items():
        assert model.load_state_dict({name: tensor}, strict=False).unexpected_keys == []
    assert_same_tensors(export(model, tmp_path), state)


def test_a_partial_shard_changes_its_part_only(tmp_path):
    model, state = other_native("all_biases"), stock_state("all_biases")
    before = export(model, tmp_path / "before")
    name = "model.layers.1.self_attn.k_proj.weight"
    model.load_state_dict({name: state[name]}, strict=False)
    assert_same_tensors(export(model, tmp_path / "after"), {**before, name: state[name]})


def test_strict_names_the_missing_part():
    state = stock_state("gqa")
    name = "model.layers.1.self_attn.k_proj.weight"
    del state[name]
    with pytest.raises(RuntimeError, match=re.escape(name)):
        other_native("gqa").load_state_dict(state)


def test_strict_names_an_unexpected_key():
    with pytest.raises(RuntimeError, match=r"self_attn\.q_proj\.bias"):
        other_native("gqa").load_state_dict({**stock_state("gqa"), "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("name", "shape", "right"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (16, 32), (32, 32)),
        ("model.layers.1.mlp.up_proj.weight", (45, 32), (44, 32)),
        ("model.layers.1.self_attn.o_proj.weight", (32, 16), (32, 32)),
    ],
)
def test_wrong_shape(name, shape, right, strict, assign):
    with pytest.raises((RuntimeError, ValueError), match=re.escape(name)) as refusal:
        other_native("gqa").load_state_dict({**stock_state("gqa"), name: torch.zeros(shape)}, strict=strict, assign=assign)
    for size in (shape, right):
        assert re.search(r"[\[(]" + r",\s*".join(map(str, size)) + r"[\])]", str(refusal.value)), f"{size} is not named"


@pytest.mark.parametrize("assign", [False, True])
def test_packed_state_dict(tmp_path, assign):
    """The model's own state dict loads too, strictly, and has no more than packed keys."""
    source, target = other_native("all_biases"), randomise(native_class("causal")(tiny_config(**CASES["all_biases"])), 3)
    state = source.state_dict()
    assert set(state) == set(dict(source.named_parameters()))
    parts = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert not any(parts & set(name.split(".")) for name in state)
    target.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=assign)
    assert_same_tensors(export(target, tmp_path / "target"), export(source, tmp_path / "source"))


@pytest.mark.parametrize("strict", [True, False])
def test_both_layouts_at_once(strict):
    """A state dict with a packed weight and one of its parts is refused, or the rows of the other parts are kept."""
    source, target = other_native("gqa"), randomise(native_class("causal")(tiny_config()), 3)
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    packed = "model.layers.0.self_attn.qkv_proj.weight"
    try:
        target.load_state_dict({**state, "model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)}, strict=strict)
    except (RuntimeError, ValueError) as refusal:
        assert "layers.0.self_attn" in str(refusal)
        return
    assert torch.equal(target.state_dict()[packed][32:], state[packed][32:])


def test_assign_keeps_the_given_tensors():
    model, state = other_native("gqa"), stock_state("gqa")
    model.load_state_dict(state, assign=True)
    assert model.model.norm.weight.data_ptr() == state["model.norm.weight"].data_ptr()


def test_assign_takes_the_dtype_of_the_state_dict(tmp_path):
    state = {name: tensor.bfloat16() for name, tensor in stock_state("all_biases").items()}
    model = other_native("all_biases")
    model.load_state_dict(state, assign=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert_same_tensors(export(model, tmp_path), state)


def test_copying_casts_to_the_model_s_dtype(tmp_path):
    state = {name: tensor.double() for name, tensor in stock_state("all_biases").items()}
    model = other_native("all_biases").bfloat16()
    model.load_state_dict(state)
    assert_same_tensors(export(model, tmp_path), {name: tensor.bfloat16() for name, tensor in state.items()})


def test_assign_into_a_meta_model(tmp_path):
    with torch.device("meta"):
        model = native_class("causal")(tiny_config(**CASES["all_biases"]))
    state = stock_state("all_biases")
    model.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert_same_tensors(export(model, tmp_path), state)


@pytest.mark.parametrize("change", ["bfloat16", "assign", "deepcopy", "pickle", "requires_grad", "load", "share", "to_empty"])
def test_parts_are_views_of_the_packed_weight(change):
    """Whatever replaces the packed parameter, the parts follow it: writing through one shows in the forward."""
    model = other_native("all_biases")
    if change == "bfloat16":
        model = model.to(torch.bfloat16).float()
    elif change == "assign":
        model.load_state_dict(stock_state("all_biases"), assign=True)
    elif change == "deepcopy":
        model = copy.deepcopy(model)
    elif change == "pickle":
        model = pickle.loads(pickle.dumps(model))
    elif change == "requires_grad":
        model.requires_grad_(False)
    elif change == "load":
        model.load_state_dict(stock_state("all_biases"))
    elif change == "share":
        model.share_memory()
    else:
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.to_empty(device="cpu").load_state_dict(state)
        model.model.rotary_emb.inv_freq.copy_(other_native("all_biases").model.rotary_emb.inv_freq)
    stock = stock_class("causal")(tiny_config(**CASES["all_biases"])).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.v_proj, layer.mlp.up_proj):
                part.weight.mul_(1.5)
                part.bias.add_(0.25)
    stock.load_state_dict(stock_names(model))
    ids = token_batch()
    with torch.no_grad():
        assert_close(model(ids).logits, stock(ids).logits)


def stock_names(model) -> dict[str, torch.Tensor]:
    """The weights of a native model under the stock names, read from the modules of those names."""
    names = stock_class("causal")(model.config).state_dict()
    return {name: getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names}


def test_deep_copy_is_independent(tmp_path):
    model = other_native("gqa")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        duplicate.model.layers[0].self_attn.q_proj.weight.zero_()
    assert_same_tensors(dict(model.state_dict()), before)
    assert not duplicate.state_dict()["model.layers.0.self_attn.qkv_proj.weight"][:32].any()


def test_parameter_count_is_the_stock_one():
    native, stock = other_native("all_biases"), stock_class("causal")(tiny_config(**CASES["all_biases"]))
    assert native.num_parameters() == stock.num_parameters()
    assert len({id(parameter) for parameter in native.parameters()}) == len(list(native.parameters()))


@pytest.mark.parametrize("rope", ["default", "llama3", "linear", "dynamic"])
@pytest.mark.parametrize("load", [{}, {"device_map": "cpu"}, {"dtype": torch.bfloat16}])
def test_rope_buffers_after_loading(tmp_path, rope, load):
    settings = {"rope_type": rope, "rope_theta": 700.0}
    if rope != "default":
        settings["factor"] = 4.0
    if rope == "llama3":
        settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    source = save_stock(tmp_path / "in", rope_parameters=settings)
    stock, native = native_pair(source, **load)
    for name in ("inv_freq", "original_inv_freq"):
        expected = getattr(stock.model.rotary_emb, name)
        actual = getattr(native.model.rotary_emb, name)
        assert actual.dtype == expected.dtype == torch.float32
        assert torch.equal(actual, expected), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rope_precision_after_a_cast(tmp_path, dtype):
    """A cast must not round the frequencies (stock's does): the model equals the one that was loaded in that dtype."""
    source = save_stock(tmp_path / "in")
    cast = native_class("causal").from_pretrained(source).to(dtype)
    loaded = native_class("causal").from_pretrained(source, dtype=dtype)
    assert torch.equal(cast.model.rotary_emb.inv_freq, stock_class("causal").from_pretrained(source).model.rotary_emb.inv_freq)
    ids = token_batch(1, 64)
    with torch.no_grad():
        assert torch.equal(cast(ids).logits, loaded(ids).logits)


def test_weights_of_a_model_loaded_on_meta_are_named(tmp_path):
    """An export of weights that are nowhere cannot be written."""
    with torch.device("meta"):
        model = native_class("causal")(tiny_config())
    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=r"(?i)meta"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_packed_export_on_request(tmp_path):
    """save_original_format=False writes the packed layout; it reloads exactly and goes back to stock, or it is refused."""
    model = native_class("causal").from_pretrained(save_stock(tmp_path / "in"))
    try:
        model.save_pretrained(tmp_path / "packed", save_original_format=False)
    except (ValueError, NotImplementedError) as refusal:
        assert "save_original_format" in str(refusal)
        return
    again = native_class("causal").from_pretrained(tmp_path / "packed")
    assert_same_tensors(export(again, tmp_path / "out"), read_tensors(tmp_path / "in"))
