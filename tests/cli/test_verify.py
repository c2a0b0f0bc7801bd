"""`liger-models verify`: equal or not, what differs, and nothing left behind."""

import json

import pytest
import torch
from cli.folders import contents
from models.families import GPT_OSS, LLAMA, MAIN
from safetensors.torch import load_file, save_file
from tiny_llama import native_class, read_tensors, save_stock, write_tensors

CASE = next(case for case in MAIN if case.family is LLAMA)
MIXTURE = next(case for case in MAIN if case.family is GPT_OSS)
NORM, Q = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory, monkeypatch):
    """Temporary folders go where this looks, and are gone afterwards."""
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    yield
    assert list(scratch.iterdir()) == []


@pytest.fixture
def differs(command):
    """Verify what has to differ; the table."""

    def run(*arguments: object) -> str:
        result = command("verify", *arguments)
        assert result.exit_code == 1 and "error: " not in result.stderr
        return result.stdout

    return run


@pytest.mark.parametrize("head", ["base", "causal_lm", "sequence_classification"])
def test_a_stock_checkpoint(checkpoint, succeeds, head):
    source = checkpoint(CASE, head)
    before = contents(source)
    output = succeeds("verify", source)
    assert f"all {len(read_tensors(source))} tensors of its export equal those of it, bit for bit" in output
    assert contents(source) == before


def test_shards_and_special_numbers(succeeds, tmp_path):
    source = save_stock(tmp_path / "in", shard="6KB")
    file = sorted(source.glob("model-*"))[0]
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[:4] = torch.tensor([torch.nan, -0.0, torch.inf, 1e-42])
    save_file(tensors, file, metadata={"format": "pt"})
    succeeds("verify", source)


def test_packed_and_quantised_checkpoints_come_back_in_their_own_form(checkpoint, succeeds, tmp_path):
    native_class("causal").from_pretrained(checkpoint(CASE)).save_pretrained(tmp_path / "packed", save_original_format=False)
    packed = read_tensors(tmp_path / "packed")
    assert f"all {len(packed)} tensors of its packed export" in succeeds("verify", tmp_path / "packed")
    succeeds("verify", tmp_path / "packed", "--against", checkpoint(CASE))
    succeeds("export", checkpoint(MIXTURE), tmp_path / "four", "--format", "mxfp4", "--dtype", "bfloat16")
    succeeds("verify", tmp_path / "four")


def test_weights_in_a_bin_file(checkpoint, copied, succeeds):
    source = copied(checkpoint(CASE))
    torch.save(read_tensors(source), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    succeeds("verify", source)


def test_every_kind_of_difference_is_named(checkpoint, copied, differs):
    other, tensors = copied(checkpoint(CASE)), read_tensors(checkpoint(CASE))
    changed = {**tensors, "model.layers.0.mlp.up_proj.weight": tensors["model.layers.0.mlp.up_proj.weight"][:-1].contiguous()}
    changed["extra"] = torch.zeros(1)
    del changed["lm_head.weight"]
    changed[NORM] = changed[NORM].bfloat16()
    changed[Q] = changed[Q].clone()
    changed[Q].view(-1)[3:5] += 1
    write_tensors(other, changed)
    table = differs(checkpoint(CASE), "--against", other)
    assert "5 tensors of its export differ from those of " in table
    for name, difference in {
        "extra": "not in the export",
        "lm_head.weight": "only in the export",
        NORM: "bfloat16, exported float32",
        "model.layers.0.mlp.up_proj.weight": "shape [47, 32], exported [48, 32]",
        Q: f"2 of {changed[Q].numel()} numbers",
    }.items():
        (line,) = [line for line in table.splitlines() if line.split()[:1] == [name]]
        assert line.strip().endswith(difference)


@pytest.mark.parametrize("value", [-0.0, torch.nan])
def test_bits_and_not_values_are_compared(checkpoint, copied, differs, value):
    """The other checkpoint has -0.0, which equals 0.0, or a NaN, where the source has 0.0."""
    source, other = copied(checkpoint(CASE)), copied(checkpoint(CASE), "other")
    for folder, number in ((source, 0.0), (other, value)):
        tensors = read_tensors(folder)
        tensors[NORM][5] = number
        write_tensors(folder, tensors)
    assert f"1 of {len(tensors[NORM])} numbers" in differs(source, "--against", other)


def test_twenty_differences_are_shown(checkpoint, copied, differs):
    other = copied(checkpoint(CASE))
    write_tensors(other, {name: tensor + 1 for name, tensor in read_tensors(other).items()})
    count = len(read_tensors(other))
    table = differs(checkpoint(CASE), "--against", other)
    assert table.count(" numbers") == 20 and f"... and {count - 20} more" in table


def test_a_configuration_of_another_dtype_differs(checkpoint, copied, differs):
    """Loading follows the configuration, so an export changes the numbers: that is what this command has to find."""
    source = copied(checkpoint(CASE))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert "float32, exported bfloat16" in differs(source)


def test_refusals(checkpoint, copied, refuses, tmp_path):
    source = checkpoint(CASE)
    assert "nowhere does not exist" in refuses("verify", tmp_path / "nowhere")
    assert "nowhere is not a folder: give that of a checkpoint" in refuses("verify", source, "--against", tmp_path / "nowhere")
    assert "--scratch" in refuses("verify", source, "--scratch", tmp_path / "nowhere")
    broken = copied(source)
    write_tensors(broken, {name: tensor for name, tensor in read_tensors(source).items() if name != NORM})
    assert f"missing key {NORM}" in refuses("verify", broken)
