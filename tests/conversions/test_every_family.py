"""What conversion promises, for every family and configuration: stock checkpoint in, the same stock checkpoint out.

What the layouts have in common (special values, offload, damaged files) is tested on Llama in the other files of this folder.
"""

import itertools
import json
import re
import shutil

import pytest
import torch
from models.comparison import inputs_of
from models.families import CASES, ONE_PER_FAMILY, Case, randomise
from tiny_llama import assert_same_tensors, bits, export, read_tensors, write_shards, write_tensors

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_family = pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="session")
def stored(build, tmp_path_factory):
    """Folder of a checkpoint that the stock class has loaded and written in a dtype; written once."""
    folders = {}

    def folder_of(case: Case, head: str = "causal_lm", dtype: torch.dtype = torch.float32):
        key = (case, head, dtype)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(f"{case}-{head}")
            build("stock", case, head, dtype=dtype).save_pretrained(folders[key])
        return folders[key]

    return folder_of


@pytest.fixture
def spoilt(stored, tmp_path):
    """A function that writes a case's checkpoint with other tensors, and returns its folder."""

    def write(case: Case, tensors: dict[str, torch.Tensor]):
        shutil.copytree(stored(case), tmp_path / "spoilt", dirs_exist_ok=True)
        write_tensors(tmp_path / "spoilt", tensors)
        return tmp_path / "spoilt"

    return write


def json_files(folder) -> dict[str, object]:
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}


def problems(refusal) -> list[str]:
    """The lines of a refusal that name a key."""
    return re.findall(r"(?:missing key|unexpected key|size mismatch for) [^\n]*", str(refusal.value))


@every_dtype
@every_case
def test_round_trip(tmp_path, stored, case: Case, dtype):
    """Same files, configuration, names, shapes, dtypes and bits; and logits, where the stock class loads the export."""
    source, stock = stored(case, dtype=dtype), case.family.stock("causal_lm")
    model = case.family.native("causal_lm").from_pretrained(source)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in source.iterdir())
    assert_same_tensors(read_tensors(tmp_path), read_tensors(source))
    assert json_files(tmp_path) == json_files(source)
    assert json_files(tmp_path)["config.json"]["architectures"] == [stock.__name__]

    loaded, info = stock.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = {"input_ids": inputs_of(loaded)["input_ids"]}
    with torch.no_grad():
        assert torch.equal(bits(loaded(**inputs).logits), bits(stock.from_pretrained(source)(**inputs).logits))


@pytest.mark.parametrize("head", ["base", "sequence_classification"])
@every_dtype
@every_family
def test_other_heads(tmp_path, stored, case: Case, dtype, head: str):
    source = stored(case, head, dtype)
    model = case.family.native(head).from_pretrained(source)
    assert_same_tensors(export(model, tmp_path), read_tensors(source))
    assert json_files(tmp_path) == json_files(source)
    assert json_files(tmp_path)["config.json"]["architectures"] == [case.family.heads[head]]


@every_case
def test_head_checkpoint_in_the_base_class(tmp_path, stored, case: Case):
    source = stored(case)
    expected = export(case.family.stock("base").from_pretrained(source), tmp_path / "stock")
    assert_same_tensors(export(case.family.native("base").from_pretrained(source), tmp_path / "native"), expected)
    assert json_files(tmp_path / "native") == json_files(tmp_path / "stock")


@every_case
def test_base_checkpoint_in_the_head_class(tmp_path, stored, case: Case):
    """Complete where the head is tied; elsewhere the stock class would make up a head."""
    source, native = stored(case, "base"), case.family.native("causal_lm")
    if case.configuration().tie_word_embeddings:
        expected = export(case.family.stock("causal_lm").from_pretrained(source), tmp_path / "stock")
        assert_same_tensors(export(native.from_pretrained(source), tmp_path / "native"), expected)
        return
    with pytest.raises(ValueError) as refusal:
        native.from_pretrained(source)
    assert problems(refusal) == ["missing key lm_head.weight"]


@every_case
def test_shards(tmp_path, stored, case: Case):
    """Neighbours in different shards on the way in; the stock class's own shards on the way out."""
    shutil.copytree(stored(case), tmp_path / "in")
    tensors = read_tensors(tmp_path / "in")
    write_shards(tmp_path / "in", tensors, 5)
    model = case.family.native("causal_lm").from_pretrained(tmp_path / "in")
    model.save_pretrained(tmp_path / "native", max_shard_size="6KB")
    case.family.stock("causal_lm").from_pretrained(tmp_path / "in").save_pretrained(tmp_path / "stock", max_shard_size="6KB")
    assert_same_tensors(read_tensors(tmp_path / "native"), tensors)
    indices = [json_files(tmp_path / name)["model.safetensors.index.json"] for name in ("native", "stock")]
    assert len(set(indices[0]["weight_map"].values())) > 4
    assert sorted(indices[0]["weight_map"]) == sorted(indices[1]["weight_map"])
    assert indices[0]["metadata"] == indices[1]["metadata"]


@every_case
def test_load_state_dict_of_stock_keys(tmp_path, stored, case: Case):
    """The Trainer's way to resume: the stored tensors, tied head absent, not strictly. And the stock state dict, strictly."""
    tensors = read_tensors(stored(case))
    state = case.family.stock("causal_lm").from_pretrained(stored(case)).state_dict()
    for number, (values, strict) in enumerate([(tensors, False), (dict(state), True)]):
        model = case.family.native("causal_lm")(case.configuration())
        randomise(model, seed=9)
        result = model.load_state_dict(values, strict=strict)
        assert set(result.missing_keys) <= state.keys() - values.keys() and not result.unexpected_keys
        assert_same_tensors(export(model, tmp_path / str(number)), tensors)


@every_family
def test_every_missing_key_is_named(spoilt, stored, case: Case):
    sound = read_tensors(stored(case))
    tied_to = "model.embed_tokens.weight" if "lm_head.weight" not in sound else None
    for key in sound:
        source = spoilt(case, {name: tensor for name, tensor in sound.items() if name != key})
        with pytest.raises(ValueError) as refusal:
            case.family.native("causal_lm").from_pretrained(source)
        gone = {key, "lm_head.weight"} if key == tied_to else {key}
        assert {problem.split()[2].rstrip(":") for problem in problems(refusal)} == gone, str(refusal.value)


@every_family
def test_every_misshapen_key_is_named(spoilt, stored, case: Case):
    """With the shape in the checkpoint and the shape in the model."""
    sound = read_tensors(stored(case))
    for key, tensor in sound.items():
        wrong = tensor.new_zeros(tensor.shape[0] + 1, *tensor.shape[1:])
        with pytest.raises(ValueError) as refusal:
            case.family.native("causal_lm").from_pretrained(spoilt(case, {**sound, key: wrong}))
        shapes = f"{tuple(wrong.shape)} in the checkpoint, {tuple(tensor.shape)} in the model"
        assert problems(refusal) == [f"size mismatch for {key}: {shapes}"], str(refusal.value)


FOREIGN_KEYS = [
    "self_attn.q_norm.weight",
    "self_attn.o_proj.bias",
    "self_attn.q_proj.bias",
    "mlp.gate_proj.weight",
    "mlp.gate_up_proj.weight",
    "mlp.down_proj.bias",
    "pre_feedforward_layernorm.weight",
    "post_self_attn_layernorm.weight",
]


@every_family
def test_keys_of_other_families_are_unexpected(spoilt, stored, case: Case):
    """What another family's block has and this one has not."""
    sound = read_tensors(stored(case))
    keys = [key for key in (f"model.layers.0.{name}" for name in FOREIGN_KEYS) if key not in sound]
    assert keys
    for key in keys:
        with pytest.raises(ValueError) as refusal:
            case.family.native("causal_lm").from_pretrained(spoilt(case, {**sound, key: torch.zeros(32)}))
        assert re.search(rf"\b{re.escape(key)}\b", str(refusal.value)), str(refusal.value)


@pytest.mark.parametrize("case, other", list(itertools.permutations(ONE_PER_FAMILY, 2)), ids=str)
def test_checkpoint_of_another_family(stored, case: Case, other: Case):
    """The keys may be the same and the mathematics not (Qwen2 and Llama, GLM and GLM-4): the error names both."""
    types = [one.configuration().model_type for one in (case, other)]
    for head in case.family.heads:
        with pytest.raises(ValueError, match=rf"type '{types[1]}'.*reads '{types[0]}': use the class of that family"):
            case.family.native(head).from_pretrained(stored(other))
    with pytest.raises(TypeError, match=f"takes a {case.family.configuration}, not a {other.family.configuration}"):
        case.family.native("causal_lm")(other.configuration())
