"""Stock checkpoint in, stock checkpoint out, for every family. What the layouts have in common is tested on Llama in
`tests/conversions`."""

import json

import pytest
import torch
from models.comparison import inputs_of
from models.families import CASES, MAIN, ONE_PER_FAMILY, Case
from tiny_llama import assert_same_tensors, export, read_tensors, write_tensors

from liger_models.pretrained import CheckpointError

one_case = pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)
HEADS = ["base", "causal_lm", "sequence_classification"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_survive_in_fp32_and_bf16(case: Case, checkpoint, build, tmp_path):
    source = checkpoint(case)
    assert_same_tensors(export(build("native", case), tmp_path / "fp32"), read_tensors(source))
    build("stock", case, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    native = case.family.native("causal_lm").from_pretrained(tmp_path / "bf16", dtype="auto")
    assert_same_tensors(export(native, tmp_path / "again"), read_tensors(tmp_path / "bf16"))


@pytest.mark.parametrize("head", HEADS)
@one_case
def test_every_file_is_what_stock_writes(case: Case, head: str, build, tmp_path):
    stock, native = build("stock", case, head), build("native", case, head)
    stock.save_pretrained(tmp_path / "stock")
    native.save_pretrained(tmp_path / "native")
    assert_same_tensors(read_tensors(tmp_path / "native"), read_tensors(tmp_path / "stock"))
    names = {path.name for path in (tmp_path / "stock").iterdir()}
    assert {path.name for path in (tmp_path / "native").iterdir()} == names
    for name in names - {"model.safetensors"}:
        assert json.loads((tmp_path / "native" / name).read_text()) == json.loads((tmp_path / "stock" / name).read_text())
    assert json.loads((tmp_path / "native" / "config.json").read_text())["architectures"] == [case.family.heads[head]]


@one_case
def test_the_stock_class_loads_the_export(case: Case, build, tmp_path):
    build("native", case).save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    loaded, info = case.family.stock("causal_lm").from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    stock, inputs = build("stock", case), inputs_of(loaded)
    assert torch.equal(loaded(**inputs).logits, stock(**inputs).logits)
    native = case.family.native("causal_lm").from_pretrained(tmp_path)
    assert_same_tensors(export(native, tmp_path / "again"), read_tensors(tmp_path))


@one_case
def test_plain_load_state_dict_of_stock_keys(case: Case, build):
    """What the Trainer does when it resumes."""
    stock = build("stock", case)
    native = case.family.native("causal_lm")(case.configuration()).eval()
    assert not any(native.load_state_dict(stock.state_dict(), strict=True))
    inputs = inputs_of(stock)
    torch.testing.assert_close(native(**inputs).logits, build("native", case)(**inputs).logits, rtol=0, atol=0)


@pytest.mark.parametrize("case", MAIN, ids=str)
def test_each_missing_key_is_named(case: Case, checkpoint, tmp_path):
    """Every key of the last layer, and those outside the layers."""
    source = checkpoint(case)
    tensors = read_tensors(source)
    last = case.configuration().num_hidden_layers - 1
    for key in [key for key in tensors if f".layers.{last}." in key or ".layers." not in key]:
        write_copy(source, tmp_path, {name: tensor for name, tensor in tensors.items() if name != key})
        with pytest.raises(CheckpointError, match=f"missing key {key}"):
            case.family.native("causal_lm").from_pretrained(tmp_path)


@one_case
def test_an_extra_key_and_a_wrong_shape_are_named(case: Case, checkpoint, tmp_path):
    source = checkpoint(case)
    tensors = read_tensors(source)
    write_copy(source, tmp_path, {**tensors, "model.layers.0.mlp.extra.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"unexpected key model\.layers\.0\.mlp\.extra\.weight"):
        case.family.native("causal_lm").from_pretrained(tmp_path)
    for key in [key for key in tensors if ".layers.0." in key and ("q_proj" in key or "norm" in key or "mlp" in key)]:
        write_copy(source, tmp_path, {**tensors, key: torch.zeros(3, *tensors[key].shape[1:])})
        with pytest.raises(CheckpointError, match=f"size mismatch for {key}"):
            case.family.native("causal_lm").from_pretrained(tmp_path)


@one_case
def test_other_families_checkpoints_are_refused(case: Case, checkpoint):
    for other in ONE_PER_FAMILY:
        if other.family != case.family:
            kind = other.configuration().model_type
            with pytest.raises(CheckpointError, match=f"a model of type '{kind}'.*use the class of that family"):
                case.family.native("causal_lm").from_pretrained(checkpoint(other))


def write_copy(source, folder, tensors) -> None:
    (folder / "config.json").write_text((source / "config.json").read_text())
    write_tensors(folder, tensors)
