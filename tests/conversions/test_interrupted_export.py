"""An export that fails leaves the target as it was: whole and loadable, or not there at all."""

import os
from pathlib import Path

import pytest
import safetensors.torch
import transformers.modeling_utils
from tiny_llama import assert_same_tensors, native_class, read_tensors, save_stock, stock_class


@pytest.fixture
def fill_the_disk(monkeypatch):
    """A function after whose call the disk is full: from the n-th weight file on, in the middle of that file."""
    write = safetensors.torch.save_file

    def fill(at: int = 2) -> list[str]:
        written: list[str] = []

        def save_file(tensors, filename, metadata=None):
            written.append(filename)
            if len(written) >= at:
                Path(filename).write_bytes(b"half of a file")
                raise OSError(28, "No space left on device")
            write(tensors, filename, metadata=metadata)

        monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", save_file)
        monkeypatch.setattr(safetensors.torch, "save_file", save_file)
        return written

    return fill


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("old_shard", ["5GB", "6KB"])
@pytest.mark.parametrize("at", [1, 2])
def test_old_target_stays_whole(tmp_path, fill_the_disk, old_shard, at):
    model = native_class("causal").from_pretrained(save_stock(tmp_path / "in"))
    exports = tmp_path / "exports"
    old = save_stock(exports / "out", seed=1, shard=old_shard)
    (old / "notes.txt").write_text("the user's own")
    before, tensors = content(exports), read_tensors(old)
    written = fill_the_disk(at)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(old, max_shard_size="6KB")
    assert len(written) == at
    assert content(exports) == before
    assert [path.name for path in exports.iterdir()] == ["out"]
    assert_same_tensors(dict(stock_class("causal").from_pretrained(old).state_dict()), tensors)


def test_new_target_is_not_left_half_written(tmp_path, fill_the_disk):
    model = native_class("causal").from_pretrained(save_stock(tmp_path / "in"))
    fill_the_disk()
    (tmp_path / "exports").mkdir()
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path / "exports" / "out", max_shard_size="6KB")
    assert content(tmp_path / "exports") == {}


def test_model_can_be_saved_after_a_failure(tmp_path, fill_the_disk, monkeypatch):
    source = save_stock(tmp_path / "in")
    model = native_class("causal").from_pretrained(source)
    fill_the_disk()
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path / "out", max_shard_size="6KB")
    monkeypatch.undo()
    model.save_pretrained(tmp_path / "out", max_shard_size="6KB")
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(source))


def test_nothing_else_is_left_after_success(tmp_path):
    model = native_class("causal").from_pretrained(save_stock(tmp_path / "in"))
    (tmp_path / "exports").mkdir()
    model.save_pretrained(tmp_path / "exports" / "out")
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["out"]
    expected = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "exports" / "out").rglob("*")} == expected


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes read-only folders")
def test_read_only_target(tmp_path):
    model = native_class("causal").from_pretrained(save_stock(tmp_path / "in"))
    old = save_stock(tmp_path / "exports" / "out", seed=1)
    before = content(old)
    old.chmod(0o555)
    try:
        with pytest.raises(OSError):
            model.save_pretrained(old)
        assert content(tmp_path / "exports") == {f"out/{name}": value for name, value in before.items()}
    finally:
        old.chmod(0o755)


def test_target_below_a_file(tmp_path):
    model = native_class("causal").from_pretrained(save_stock(tmp_path / "in"))
    (tmp_path / "file").write_text("the user's own")
    with pytest.raises(OSError):
        model.save_pretrained(tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "the user's own"
    assert {path.name for path in tmp_path.iterdir()} == {"in", "file"}


def test_target_that_is_a_file(tmp_path):
    """The stock class logs an error and writes nothing; an exception is as good."""
    model = native_class("causal").from_pretrained(save_stock(tmp_path / "in"))
    (tmp_path / "file").write_text("the user's own")
    try:
        model.save_pretrained(tmp_path / "file")
    except (OSError, ValueError) as refusal:
        assert "file" in str(refusal)
    assert (tmp_path / "file").read_text() == "the user's own"
    assert {path.name for path in tmp_path.iterdir()} == {"in", "file"}


def test_file_modes_are_the_umask_s(tmp_path):
    """A folder that was made elsewhere and moved must not be the writer's alone."""
    source = save_stock(tmp_path / "in")
    native_class("causal").from_pretrained(source).save_pretrained(tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == source.stat().st_mode
    for path in source.iterdir():
        assert (tmp_path / "out" / path.name).stat().st_mode == path.stat().st_mode, path.name
