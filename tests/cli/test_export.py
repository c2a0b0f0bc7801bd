"""`liger-models export`: the stock checkpoint, what goes with it, and what is refused."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers.modeling_utils
from cli.folders import TOKENIZER, add, contents
from models.families import GPT_OSS, LLAMA, MAIN, ONE_PER_FAMILY, randomise
from safetensors import SafetensorError
from tiny_llama import assert_same_tensors, native_class, read_tensors, save_stock
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Model

from liger_models.cli.export import HEADERS
from liger_models.cli.output import size

CASE = next(case for case in MAIN if case.family is LLAMA)
MIXTURE = next(case for case in MAIN if case.family is GPT_OSS)


def changed_config(folder: Path, **changes) -> Path:
    """The checkpoint with other entries in its config.json; None takes one out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


def overhead(source: Path) -> int:
    """What `export` counts beside the weights."""
    return HEADERS + (source / "generation_config.json").stat().st_size


# ---------------------------------------------------------------------------------------------------------------------
# What comes out


@pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)
def test_the_export_has_the_tensors_of_the_source(checkpoint, succeeds, tmp_path, case):
    source = checkpoint(case)
    succeeds("export", source, tmp_path / "out")
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(source))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [case.family.heads["causal_lm"]]


@pytest.mark.parametrize("head", ["base", "sequence_classification"])
def test_the_architecture_chooses_the_head(checkpoint, succeeds, tmp_path, head):
    source = checkpoint(CASE, head)
    output = succeeds("export", source, tmp_path / "out")
    assert f" as {CASE.family.heads[head]}, 1 weight file, " in output
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(source))


@pytest.mark.parametrize("stock", [Gemma3ForConditionalGeneration, Gemma3Model])
def test_a_model_that_sees_images(succeeds, tmp_path, stock):
    text = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, head_dim=16, vocab_size=97)
    vision = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=2)
    vision["vision_use_head"] = False
    model = stock(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96))
    randomise(model)
    model.save_pretrained(tmp_path / "in")
    succeeds("export", tmp_path / "in", tmp_path / "out")
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(tmp_path / "in"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [stock.__name__]


def test_without_an_architecture_it_is_a_language_model(checkpoint, copied, succeeds, tmp_path):
    source = changed_config(copied(checkpoint(CASE)), architectures=None)
    assert " as LlamaForCausalLM, " in succeeds("export", source, tmp_path / "out")


def test_the_packed_layout_becomes_stock(checkpoint, succeeds, tmp_path):
    source = checkpoint(CASE)
    native_class("causal").from_pretrained(source).save_pretrained(tmp_path / "packed", save_original_format=False)
    assert any("qkv_proj" in name for name in read_tensors(tmp_path / "packed"))
    succeeds("export", tmp_path / "packed", tmp_path / "out")
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(source))


def test_dtype(checkpoint, succeeds, tmp_path):
    source = checkpoint(CASE)
    succeeds("export", source, tmp_path / "out", "--dtype", "bfloat16")
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in read_tensors(source).items()}
    assert_same_tensors(read_tensors(tmp_path / "out"), expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_shards(checkpoint, succeeds, tmp_path):
    source = checkpoint(CASE)
    succeeds("export", source, tmp_path / "out", "--max-shard-size", "20KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(source))


def test_mxfp4_and_back(checkpoint, succeeds, tmp_path):
    succeeds("export", checkpoint(MIXTURE), tmp_path / "four", "--format", "mxfp4", "--dtype", "bfloat16")
    assert any(name.endswith("_blocks") for name in read_tensors(tmp_path / "four"))
    succeeds("export", tmp_path / "four", tmp_path / "again", "--format", "mxfp4")
    assert_same_tensors(read_tensors(tmp_path / "again"), read_tensors(tmp_path / "four"))
    succeeds("export", tmp_path / "four", tmp_path / "stock")
    stock = read_tensors(tmp_path / "stock")
    assert not any(name.endswith("_blocks") for name in stock)
    assert "quantization_config" not in json.loads((tmp_path / "stock" / "config.json").read_text())
    for name, tensor in read_tensors(checkpoint(MIXTURE)).items():
        assert (stock[name] - tensor).norm() < 0.25 * tensor.norm(), name  # one bit of mantissa: half a spacing is 1/4


def test_tokenizer_and_processor_files_are_copied(checkpoint, copied, succeeds, tmp_path):
    source = add(copied(checkpoint(CASE)), TOKENIZER)
    add(source, {"optimizer.pt": "", "model.gguf": "", "original.pth": "", ".gitattributes": ""})
    add(source, {"model.safetensors.index.json.bak": ""})
    output = succeeds("export", source, tmp_path / "out")
    written = contents(tmp_path / "out")
    assert {name: written[name].decode() for name in TOKENIZER} == TOKENIZER
    own = {"config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json.bak"}
    assert set(written) == {*own, *TOKENIZER}
    for name in TOKENIZER:
        assert name in output


def test_a_generation_configuration_is_that_of_the_model(checkpoint, copied, succeeds, tmp_path):
    source = copied(checkpoint(CASE))
    path = source / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_new_tokens": 17}))
    succeeds("export", source, tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.max_new_tokens == 17


def test_weights_in_a_bin_file(checkpoint, copied, succeeds, tmp_path):
    source = copied(checkpoint(CASE))
    torch.save(read_tensors(source), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    succeeds("export", source, tmp_path / "out")
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(checkpoint(CASE)))
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Where it goes


def test_an_empty_folder_is_taken(checkpoint, succeeds, tmp_path):
    (tmp_path / "out").mkdir()
    succeeds("export", checkpoint(CASE), tmp_path / "out")
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(checkpoint(CASE)))


def test_a_folder_with_files_is_refused_and_forced(checkpoint, copied, refuses, succeeds, tmp_path):
    old = save_stock(tmp_path / "out", seed=1, shard="6KB")
    add(old, {"notes.txt": "the user's own", "additional_chat_templates/tools.jinja": "old", "tokenizer.json": "old"})
    source = add(copied(checkpoint(CASE)), TOKENIZER)
    before = contents(old)
    assert "is not empty: give another folder, or --force" in refuses("export", source, old)
    assert contents(old) == before
    succeeds("export", source, old, "--force")
    assert_same_tensors(read_tensors(old), read_tensors(source))  # an index that stayed would be read first, and fail
    written = contents(old)
    assert {name: written[name].decode() for name in TOKENIZER} == TOKENIZER
    assert written["notes.txt"] == b"the user's own"
    assert not [name for name in written if "-of-" in name]


def test_destinations_that_are_refused(checkpoint, refuses, tmp_path):
    source = checkpoint(CASE)
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "file").write_text("the user's own")
    assert "is the source itself" in refuses("export", source, source, "--force")
    assert "is the source itself" in refuses("export", source, tmp_path / "link", "--force")
    assert "is a file: give a folder" in refuses("export", source, tmp_path / "file", "--force")
    assert "file is not a folder that this user may write to" in refuses("export", source, tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "the user's own"


@pytest.mark.parametrize(("dtype", "itemsize"), [("auto", 4), ("bfloat16", 2)])
def test_too_small_a_disk_is_refused_with_what_is_missing(checkpoint, refuses, monkeypatch, tmp_path, dtype, itemsize):
    source = checkpoint(CASE)
    needed = sum(tensor.numel() * itemsize for tensor in read_tensors(source).values()) + overhead(source)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, needed - 1500))
    message = refuses("export", source, tmp_path / "deep" / "out", "--dtype", dtype)
    assert f"{size(needed)} are to be written and {size(needed - 1500)} are free, 1.5 KB too little" in message
    assert not (tmp_path / "deep").exists()


def test_a_disk_of_just_that_size_is_enough(checkpoint, succeeds, monkeypatch, tmp_path):
    """The estimate is exact but for the headers: tied weights count once, experts in MXFP4 4.25 bits a number."""
    usage = namedtuple("usage", "total used free")
    for case, options in ((CASE, ()), (MIXTURE, ("--format", "mxfp4", "--dtype", "bfloat16"))):
        succeeds("export", checkpoint(case), tmp_path / f"{case}-first", *options)
        needed = sum(tensor.nbytes for tensor in read_tensors(tmp_path / f"{case}-first").values())
        needed += overhead(checkpoint(case))
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", lambda path, needed=needed: usage(10**9, 0, needed))
            succeeds("export", checkpoint(case), tmp_path / f"{case}-second", *options)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_disk_that_fills_leaves_nothing(checkpoint, refuses, monkeypatch, tmp_path, error):
    def save_file(_tensors, filename, metadata=None):
        Path(filename).write_bytes(b"half of a file")
        raise error

    source = checkpoint(CASE)
    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", save_file)
    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    message = refuses("export", source, tmp_path / "exports" / "out")
    assert "could not be written, and is as it was: " in message and "No space left" in message
    assert contents(tmp_path) == {}


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_sources_that_are_no_checkpoints(checkpoint, copied, refuses, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    out = tmp_path / "out"
    assert "nowhere does not exist; give the folder of a checkpoint" in refuses("export", tmp_path / "nowhere", out)
    assert "file is a file; give the folder" in refuses("export", tmp_path / "file", out)
    assert "empty has no config.json" in refuses("export", tmp_path / "empty", out)
    broken = copied(checkpoint(CASE))
    (broken / "model.safetensors").unlink()
    assert "in has no weights: none of model.safetensors, " in refuses("export", broken, out)
    (broken / "config.json").write_text('{"model_type": ')
    assert "config.json is not valid JSON" in refuses("export", broken, out)
    (broken / "config.json").write_text("[]")
    assert "config.json does not hold a JSON object" in refuses("export", broken, out)
    (broken / "config.json").write_text("{}")
    assert "config.json names no model_type" in refuses("export", broken, out)
    assert not out.exists()


def test_a_missing_shard(refuses, tmp_path):
    source = save_stock(tmp_path / "in", shard="6KB")
    gone = sorted(source.glob("model-*"))[1]
    gone.unlink()
    assert f"names files that are not there ({gone.name})" in refuses("export", source, tmp_path / "out")


def test_models_that_no_native_class_reads(checkpoint, copied, refuses, tmp_path):
    source = changed_config(copied(checkpoint(CASE)), model_type="gpt2")
    message = refuses("export", source, tmp_path / "out")
    assert "no native class for model type 'gpt2'; there are classes for gemma, " in message
    changed_config(source, model_type="llama", architectures=["LlamaForTokenClassification"])
    message = refuses("export", source, tmp_path / "out")
    assert "'LlamaForTokenClassification'; for model type 'llama' there are classes for LlamaModel, " in message
    changed_config(source, architectures=["LlamaForCausalLM"], quantization_config={"quant_method": "awq"})
    assert "quantised with 'awq', which LigerLlamaForCausalLM does not read" in refuses("export", source, tmp_path / "out")


def test_weights_that_do_not_fit(checkpoint, copied, refuses, tmp_path):
    source = changed_config(copied(checkpoint(CASE)), num_hidden_layers=4)
    message = refuses("export", source, tmp_path / "out")
    assert "does not fit LigerLlamaForCausalLM" in message and "missing key model.layers.3.self_attn.q_proj.weight" in message
    assert not (tmp_path / "out").exists()


def test_options_are_refused_before_anything_is_loaded(checkpoint, refuses, monkeypatch, tmp_path):
    def loads(*_, **__):
        raise AssertionError("loaded")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", loads)
    source, out = checkpoint(CASE), tmp_path / "out"
    message = refuses("export", source, out, "--format", "mxfp4")
    assert "LigerLlamaForCausalLM cannot write 'mxfp4': it writes stock" in message
    assert "--max-shard-size 'large' is not a size" in refuses("export", source, out, "--max-shard-size", "large")


@pytest.mark.parametrize("options", [("--dtype", "int8"), ("--format", "gguf"), ("--shape", "8b")])
def test_options_that_do_not_exist(checkpoint, command, tmp_path, options):
    result = command("export", checkpoint(CASE), tmp_path / "out", *options)
    assert result.exit_code == 2 and options[0] in result.stderr
