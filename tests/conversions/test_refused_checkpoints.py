"""A checkpoint that does not fit is refused with the reason: nothing is initialised silently, no model comes back."""

import json
import re

import pytest
import torch
from safetensors import SafetensorError
from tiny_llama import CASES, native_class, read_tensors, save_stock, stock_class, write_shards, write_tensors
from transformers import GPT2Config, GPT2LMHeadModel, GraniteConfig, Qwen2Config, Qwen2ForCausalLM

REFUSED = (ValueError, RuntimeError, OSError, KeyError)
MISSING = [
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.bias",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.mlp.gate_proj.bias",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return read_tensors(save_stock(tmp_path_factory.mktemp("sound"), **CASES["all_biases"]))


@pytest.fixture
def source(tmp_path):
    """A sound checkpoint with all biases, for a test to spoil."""
    return save_stock(tmp_path / "in", **CASES["all_biases"])


@pytest.mark.parametrize("key", MISSING)
def test_missing_key(source, sound, key):
    write_tensors(source, {name: tensor for name, tensor in sound.items() if name != key})
    with pytest.raises(REFUSED, match=re.escape(key)):
        native_class("causal").from_pretrained(source)


def test_several_missing_keys_are_all_named(source, sound):
    gone = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(2) for part in "qkv"]
    write_tensors(source, {name: tensor for name, tensor in sound.items() if name not in gone})
    with pytest.raises(REFUSED) as refusal:
        native_class("causal").from_pretrained(source)
    assert [key for key in gone if key not in str(refusal.value)] == []


def test_missing_layer(source, sound):
    write_tensors(source, {name: tensor for name, tensor in sound.items() if ".layers.1." not in name})
    with pytest.raises(REFUSED, match=re.escape("model.layers.1.")):
        native_class("causal").from_pretrained(source)


def test_missing_key_in_a_shard(source, sound):
    key = "model.layers.1.self_attn.v_proj.weight"
    write_shards(source, {name: tensor for name, tensor in sound.items() if name != key}, 4)
    with pytest.raises(REFUSED, match=re.escape(key)):
        native_class("causal").from_pretrained(source)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "something",
    ],
)
def test_extra_key(source, sound, key):
    write_tensors(source, {**sound, key: torch.zeros(32)})
    with pytest.raises(REFUSED, match=re.escape(key)):
        native_class("causal").from_pretrained(source)


def test_bias_that_the_configuration_has_not(tmp_path, sound):
    source = save_stock(tmp_path / "in")
    write_tensors(source, sound)
    with pytest.raises(REFUSED, match=re.escape("model.layers.0.self_attn.q_proj.bias")):
        native_class("causal").from_pretrained(source)


@pytest.mark.parametrize(
    ("key", "shape", "right"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (16, 32), (32, 32)),
        ("model.layers.0.self_attn.k_proj.weight", (32, 32), (16, 32)),
        ("model.layers.1.self_attn.v_proj.weight", (16, 31), (16, 32)),
        ("model.layers.1.self_attn.v_proj.bias", (17,), (16,)),
        ("model.layers.0.mlp.gate_proj.weight", (43, 32), (44, 32)),
        ("model.layers.0.mlp.down_proj.weight", (32, 45), (32, 44)),
        ("model.norm.weight", (33,), (32,)),
        ("model.embed_tokens.weight", (60, 32), (61, 32)),
        ("lm_head.weight", (62, 32), (61, 32)),
    ],
)
def test_wrong_shape(source, sound, key, shape, right):
    write_tensors(source, {**sound, key: torch.zeros(shape)})
    with pytest.raises(REFUSED, match=re.escape(key)) as refusal:
        native_class("causal").from_pretrained(source)
    for size in (shape, right):
        assert re.search(r"[\[(]" + r",\s*".join(map(str, size)) + r",?[\])]", str(refusal.value)), f"{size} is not named"


def test_wrong_shapes_that_cancel(source, sound):
    """The parts of one packed weight sum to its size, but the split is another model's."""
    q, k = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
    write_tensors(source, {**sound, q: torch.zeros(16, 32), k: torch.zeros(32, 32)})
    with pytest.raises(REFUSED, match=re.escape(q)):
        native_class("causal").from_pretrained(source)


def test_gate_and_up_that_cancel(source, sound):
    gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    write_tensors(source, {**sound, gate: torch.zeros(40, 32), up: torch.zeros(48, 32)})
    with pytest.raises(REFUSED, match=re.escape(gate)):
        native_class("causal").from_pretrained(source)


@pytest.mark.parametrize("key", ["model.layers.0.self_attn.k_proj.weight", "lm_head.weight"])
def test_ignored_mismatches(source, sound, key):
    """Honoured as in stock (everything else loaded) or refused by name."""
    write_tensors(source, {**sound, key: torch.zeros(24, 32)})
    stock = dict(stock_class("causal").from_pretrained(source, ignore_mismatched_sizes=True).state_dict())
    try:
        model = native_class("causal").from_pretrained(source, ignore_mismatched_sizes=True)
    except REFUSED as refusal:
        assert key in str(refusal)
        return
    model.save_pretrained(source / "out")
    for name, tensor in read_tensors(source / "out").items():
        assert tensor.isfinite().all()
        assert name == key or torch.equal(tensor, stock[name]), name


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_checkpoint_of_another_family(tmp_path, family):
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16))
        model.config.intermediate_size = 44  # or a Llama built from this configuration would be a large one
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=61, num_key_value_heads=2, **sizes))
    model.save_pretrained(tmp_path)
    with pytest.raises(REFUSED, match=family):
        native_class("causal").from_pretrained(tmp_path)


@pytest.mark.parametrize("route", ["class", "_from_config", "from_pretrained"])
@pytest.mark.parametrize("config_class", [Qwen2Config, GraniteConfig])
def test_configuration_of_another_family(tmp_path, config_class, route):
    """Granite's has every attribute of Llama's and other mathematics (its multipliers): it must not pass."""
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = config_class(vocab_size=61, num_key_value_heads=2, **sizes)
    cls = native_class("causal")
    with pytest.raises((*REFUSED, TypeError), match=rf"(?i){config.model_type}"):
        if route == "class":
            cls(config)
        elif route == "_from_config":
            cls._from_config(config)
        else:
            cls.from_pretrained(save_stock(tmp_path / "in"), config=config)


@pytest.mark.parametrize("keep", [4, 200, 0.5, -1])
def test_truncated_file(source, keep):
    file = source / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises((*REFUSED, SafetensorError)):
        native_class("causal").from_pretrained(source)


def test_missing_shard(source, sound):
    write_shards(source, sound, 3)
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(REFUSED, match="model-00002-of-00003"):
        native_class("causal").from_pretrained(source)


def test_index_without_an_entry(source, sound):
    """The shard holds the tensor but the index forgot it; the files are what counts, as in stock, or it is refused."""
    write_shards(source, sound, 3)
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    key = "model.layers.0.self_attn.q_proj.weight"
    del content["weight_map"][key]
    index.write_text(json.dumps(content))
    try:
        model = native_class("causal").from_pretrained(source)
    except REFUSED as refusal:
        assert key in str(refusal)
        return
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, sound[key])


def test_empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(REFUSED, match="empty"):
        native_class("causal").from_pretrained(tmp_path / "empty")


def test_folder_without_weights(source):
    (source / "model.safetensors").unlink()
    with pytest.raises(REFUSED, match=r"safetensors"):
        native_class("causal").from_pretrained(source)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_corrupt_json(source, sound, file):
    write_shards(source, sound, 2)
    (source / file).write_text((source / file).read_text()[:-20])
    with pytest.raises(REFUSED):
        native_class("causal").from_pretrained(source)


def test_refusal_also_with_loading_info(source, sound):
    """output_loading_info reports, it does not turn an incomplete load into a sound one."""
    key = "model.norm.weight"
    write_tensors(source, {name: tensor for name, tensor in sound.items() if name != key})
    with pytest.raises(REFUSED, match=re.escape(key)):
        native_class("causal").from_pretrained(source, output_loading_info=True)
