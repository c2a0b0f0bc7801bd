"""Stock checkpoint in, stock checkpoint out: the same names, shapes, dtypes and bits."""

import json
import shutil

import pytest
import torch
from tiny_llama import (
    CASES,
    HEADS,
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
    write_shards,
    write_tensors,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", CASES)
def test_every_layout(tmp_path, case):
    source = save_stock(tmp_path / "in", **CASES[case])
    assert_same_tensors(export(native_class("causal").from_pretrained(source), tmp_path / "out"), read_tensors(source))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_and_dtype(tmp_path, head, dtype):
    source = save_stock(tmp_path / "in", head, dtype=dtype)
    model = native_class(head).from_pretrained(source)
    assert model.dtype == dtype
    assert_same_tensors(export(model, tmp_path / "out"), read_tensors(source))


@pytest.mark.parametrize("head", HEADS)
def test_all_files_are_what_stock_writes(tmp_path, head):
    source = save_stock(
        tmp_path / "in", head, torch_dtype="float32", rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    stock, native = native_pair(source, head)
    stock.save_pretrained(tmp_path / "stock")
    native.save_pretrained(tmp_path / "native")
    files = {path.name for path in (tmp_path / "stock").iterdir()}
    assert {path.name for path in (tmp_path / "native").iterdir()} == files
    for name in files - {"model.safetensors"}:
        assert json.loads((tmp_path / "native" / name).read_text()) == json.loads((tmp_path / "stock" / name).read_text())
    assert json.loads((tmp_path / "native" / "config.json").read_text())["architectures"] == [stock_class(head).__name__]


@pytest.mark.parametrize("case", ["gqa", "all_biases", "tied"])
def test_stock_class_loads_the_export(tmp_path, case):
    source = save_stock(tmp_path / "in", **CASES[case])
    expected = stock_class("causal").from_pretrained(source)
    native_class("causal").from_pretrained(source).save_pretrained(tmp_path / "out")
    model, info = stock_class("causal").from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = token_batch()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("case", ["gqa", "all_biases", "tied"])
def test_sharded_in(tmp_path, case):
    """Five shards with neighbours apart: q, k and v of one packed weight lie in different files."""
    source = save_stock(tmp_path / "in", **CASES[case])
    tensors = read_tensors(source)
    write_shards(source, tensors, 5)
    assert_same_tensors(read_tensors(source), tensors)
    assert_same_tensors(export(native_class("causal").from_pretrained(source), tmp_path / "out"), tensors)


@pytest.mark.parametrize("case", ["gqa", "all_biases", "tied"])
def test_sharded_out(tmp_path, case):
    source = save_stock(tmp_path / "in", **CASES[case])
    native_class("causal").from_pretrained(source).save_pretrained(tmp_path / "out", max_shard_size="6KB")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 4
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(source))
    _, info = stock_class("causal").from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_sharded_out_as_stock_shards(tmp_path):
    """Shards are cut from the stock tensors, so the index is the stock one."""
    source = save_stock(tmp_path / "in", shard="6KB")
    native_class("causal").from_pretrained(source).save_pretrained(tmp_path / "out", max_shard_size="6KB")
    indices = [json.loads((tmp_path / f / "model.safetensors.index.json").read_text()) for f in ("in", "out")]
    assert sorted(indices[1]["weight_map"]) == sorted(indices[0]["weight_map"])
    assert indices[1]["metadata"] == indices[0]["metadata"]


def test_head_checkpoint_into_base_model(tmp_path):
    source = save_stock(tmp_path / "in")
    expected = export(stock_class("base").from_pretrained(source), tmp_path / "stock")
    assert_same_tensors(export(native_class("base").from_pretrained(source), tmp_path / "native"), expected)


def test_base_checkpoint_into_tied_head_model(tmp_path):
    """Tied, the base checkpoint is complete."""
    source = save_stock(tmp_path / "in", "base", tie_word_embeddings=True)
    expected = export(stock_class("causal").from_pretrained(source), tmp_path / "stock")
    assert_same_tensors(export(native_class("causal").from_pretrained(source), tmp_path / "native"), expected)


@pytest.mark.parametrize("head", ["base", "causal"])
def test_language_model_checkpoint_into_classifier(tmp_path, head):
    """A new classification head is what the user asks for; all else must be the checkpoint's."""
    source = save_stock(tmp_path / "in", head)
    exported = export(native_class("classification").from_pretrained(source), tmp_path / "out")
    score = exported.pop("score.weight")
    assert torch.isfinite(score).all() and score.std() > 0
    expected = {k if k.startswith("model.") else f"model.{k}": v for k, v in read_tensors(source).items() if "lm_head" not in k}
    assert_same_tensors(exported, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["gqa", "all_biases"])
def test_special_values_keep_their_bits(tmp_path, case, dtype):
    """NaN payloads of both signs, infinities, negative zero and subnormals in every weight."""
    source = save_stock(tmp_path / "in", dtype=dtype, **CASES[case])
    tensors = read_tensors(source)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    nan = torch.tensor([float("nan")], dtype=dtype).view(integer)
    patterns = torch.cat([nan | 1, (nan | 5) | torch.iinfo(integer).min, torch.tensor([1], dtype=integer)]).view(dtype)
    assert patterns[:2].isnan().all()
    special = torch.cat([patterns, torch.tensor([-0.0, float("inf"), float("-inf")], dtype=dtype)])
    for tensor in tensors.values():
        tensor.view(-1)[: len(special)] = special
        tensor.view(-1)[-len(special) :] = special
    write_tensors(source, tensors)
    assert_same_tensors(export(native_class("causal").from_pretrained(source), tmp_path / "out"), tensors)


@pytest.mark.parametrize("load", [{"device_map": "cpu"}, {"device_map": {"": "cpu"}}, {"low_cpu_mem_usage": True}])
def test_loading_routes(tmp_path, load):
    source = save_stock(tmp_path / "in", shard="6KB", **CASES["all_biases"])
    model = native_class("causal").from_pretrained(source, **load)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert_same_tensors(export(model, tmp_path / "out"), read_tensors(source))


@pytest.mark.parametrize("case", ["gqa", "all_biases"])
@pytest.mark.parametrize("shard", ["5GB", "6KB"])
def test_disk_offload(tmp_path, case, shard):
    source = save_stock(tmp_path / "in", **CASES[case])
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    model = native_class("causal").from_pretrained(
        source, device_map={**places, "model.layers.1": "disk", "lm_head": "cpu"}, offload_folder=tmp_path / "offload"
    )
    ids = token_batch()
    with torch.no_grad():
        assert_close(model(ids).logits, stock_class("causal").from_pretrained(source)(ids).logits)
    with pytest.warns(UserWarning, match="offloaded"):
        model.save_pretrained(tmp_path / "out", max_shard_size=shard)
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(source))


def test_variant(tmp_path):
    source = tmp_path / "in"
    save_stock(source)
    stock_class("causal").from_pretrained(source).save_pretrained(source, variant="fp32")
    (source / "model.safetensors").unlink()
    model = native_class("causal").from_pretrained(source, variant="fp32")
    model.save_pretrained(tmp_path / "out", variant="fp32")
    assert_same_tensors(read_tensors(tmp_path / "out", "fp32"), read_tensors(source, "fp32"))


def test_subfolder(tmp_path):
    source = save_stock(tmp_path / "in" / "part")
    model = native_class("causal").from_pretrained(tmp_path / "in", subfolder="part")
    assert_same_tensors(export(model, tmp_path / "out"), read_tensors(source))


@pytest.mark.parametrize("case", CASES)
def test_model_made_from_scratch(tmp_path, case):
    model = randomise(native_class("causal")(tiny_config(**CASES[case])))
    model.save_pretrained(tmp_path / "out")
    stock, info = stock_class("causal").from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = token_batch()
    with torch.no_grad():
        assert_close(model(ids).logits, stock(ids).logits)


def test_initialisation_is_the_stock_distribution():
    """The standard deviation of the stock initialisation in every weight; biases zero, norms one."""
    model = native_class("causal")(tiny_config(hidden_size=128, intermediate_size=256, attention_bias=True, mlp_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            # 61 * 128 samples or more: the sample deviation lies within 4 / sqrt(2 * 7808) = 3.2 % of the true one
            assert parameter.std().item() == pytest.approx(model.config.initializer_range, rel=0.04), name


def test_save_after_save(tmp_path):
    source = save_stock(tmp_path / "in")
    model = native_class("causal").from_pretrained(source)
    for _ in range(2):
        assert_same_tensors(export(model, tmp_path / "out"), read_tensors(source))
    again = native_class("causal").from_pretrained(tmp_path / "out")
    assert_same_tensors(export(again, tmp_path / "again"), read_tensors(source))


def test_save_over_the_folder_it_was_loaded_from(tmp_path):
    source = save_stock(tmp_path / "in")
    expected = read_tensors(source)
    model = native_class("causal").from_pretrained(source)
    model.save_pretrained(source)
    assert_same_tensors(read_tensors(source), expected)


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_no_stale_shard_is_left(tmp_path, shard):
    target = save_stock(tmp_path / "out", seed=1, shard="4KB")
    (target / "notes.txt").write_text("the user's own")
    (target / "tokenizer.json").write_text("{}")
    source = save_stock(tmp_path / "in")
    native_class("causal").from_pretrained(source).save_pretrained(target, max_shard_size=shard)
    index = target / "model.safetensors.index.json"
    wanted = {"model.safetensors"} if shard == "5GB" else set(json.loads(index.read_text())["weight_map"].values())
    assert {path.name for path in target.glob("*.safetensors")} == wanted
    assert (target / "notes.txt").read_text() == "the user's own"
    assert (target / "tokenizer.json").exists()
    loaded = stock_class("causal").from_pretrained(target)
    assert_same_tensors(dict(loaded.state_dict()), dict(stock_class("causal").from_pretrained(source).state_dict()))


@pytest.mark.parametrize("argument", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, "bfloat16", "auto"])
def test_dtype_argument_casts_as_stock(tmp_path, argument, dtype):
    source = save_stock(tmp_path / "in", **CASES["all_biases"])
    expected = export(stock_class("causal").from_pretrained(source, **{argument: dtype}), tmp_path / "stock")
    actual = export(native_class("causal").from_pretrained(source, **{argument: dtype}), tmp_path / "native")
    assert_same_tensors(actual, expected)


def test_bfloat16_to_float32_is_exact(tmp_path):
    source = save_stock(tmp_path / "in", dtype=torch.bfloat16)
    actual = export(native_class("causal").from_pretrained(source, dtype=torch.float32), tmp_path / "out")
    assert_same_tensors(actual, {name: tensor.float() for name, tensor in read_tensors(source).items()})


def test_old_rotary_buffers_are_ignored_as_in_stock(tmp_path):
    source = save_stock(tmp_path / "in")
    tensors = read_tensors(source)
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.full((4,), 7.0) for layer in range(2)}
    write_tensors(source, {**tensors, **old})
    stock, native = native_pair(source)
    ids = token_batch()
    with torch.no_grad():
        assert_close(native(ids).logits, stock(ids).logits)
    assert_same_tensors(export(native, tmp_path / "out"), tensors)


def test_tied_checkpoint_that_stores_both(tmp_path):
    """Some tools write the tied head beside the embedding."""
    source = save_stock(tmp_path / "in", tie_word_embeddings=True)
    tensors = read_tensors(source)
    write_tensors(source, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    model = native_class("causal").from_pretrained(source)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_tensors(export(model, tmp_path / "out"), tensors)


@pytest.mark.parametrize("rotary", [{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}])
def test_rope_settings_survive(tmp_path, rotary):
    rotary = {**rotary, "rope_theta": 5000.0, "original_max_position_embeddings": 16}
    source = save_stock(tmp_path / "in", rope_parameters=rotary)
    native_class("causal").from_pretrained(source).save_pretrained(tmp_path / "out")
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("in", "out"))
    assert after["rope_parameters"] == before["rope_parameters"]


def test_state_dict_argument_of_save_pretrained(tmp_path):
    """The Trainer and accelerate pass a state dict that they gathered: its values are saved, not the model's."""
    source, other = save_stock(tmp_path / "in"), save_stock(tmp_path / "other", seed=1)
    gathered = dict(native_class("causal").from_pretrained(other).state_dict())
    native_class("causal").from_pretrained(source).save_pretrained(tmp_path / "out", state_dict=gathered)
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(other))


def test_moved_checkpoint(tmp_path):
    """Nothing in an export refers to where it was written."""
    source = save_stock(tmp_path / "in")
    native_class("causal").from_pretrained(source).save_pretrained(tmp_path / "out", max_shard_size="6KB")
    shutil.move(tmp_path / "out", tmp_path / "moved")
    shutil.rmtree(source)
    again = native_class("causal").from_pretrained(tmp_path / "moved")
    assert_same_tensors(export(again, tmp_path / "again"), read_tensors(tmp_path / "moved"))
