"""Tiny Llama models, stock and native, and how their checkpoints are compared bit for bit."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel, PreTrainedModel

import liger_models

VOCABULARY = 61
# Each case changes what the packed layout depends on: part sizes, biases, tying.
CASES = {
    "gqa": {},
    "one_kv_head": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "all_biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 12},
}
HEADS = {
    "base": (LlamaModel, "LigerLlamaModel"),
    "causal": (LlamaForCausalLM, "LigerLlamaForCausalLM"),
    "classification": (LlamaForSequenceClassification, "LigerLlamaForSequenceClassification"),
}
# Two correct fp32 implementations differ by the order of their sums: here at most 64 terms each, through two layers.
TOLERANCE = 64 * 2.0**-23


def tiny_config(**changes) -> LlamaConfig:
    """A two-layer Llama: hidden size 32, 4 query heads over 2 KV heads."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_labels": 3,
    }
    return LlamaConfig(**{**values, **changes})


def stock_class(head: str) -> type[PreTrainedModel]:
    return HEADS[head][0]


def native_class(head: str) -> type[PreTrainedModel]:
    return getattr(liger_models, HEADS[head][1])


def randomise(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Every parameter random, biases and norms too: a weight that lands in the wrong place shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    return model.eval()


def stock_model(head: str = "causal", seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> PreTrainedModel:
    """A stock model of the tiny configuration, every parameter random."""
    return randomise(stock_class(head)(tiny_config(**changes)).to(dtype), seed)


def save_stock(folder: Path, head: str = "causal", seed: int = 0, dtype=torch.float32, shard: str = "5GB", **changes) -> Path:
    """A stock checkpoint in `folder`."""
    stock_model(head, seed, dtype, **changes).save_pretrained(folder, max_shard_size=shard)
    return Path(folder)


def native_pair(folder: Path, head: str = "causal", **load) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The stock and the native model of one checkpoint."""
    return stock_class(head).from_pretrained(folder, **load), native_class(head).from_pretrained(folder, **load)


def read_tensors(folder: Path, variant: str | None = None) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name; the index, where there is one, must agree with the files."""
    suffix = f".{variant}" if variant else ""
    index = Path(folder) / f"model.safetensors.index{suffix}.json"
    if not index.exists():
        return load_file(Path(folder) / f"model{suffix}.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    tensors = {}
    for file in sorted(set(weight_map.values())):
        content = load_file(Path(folder) / file)
        assert set(content) == {key for key, place in weight_map.items() if place == file}, f"{file} does not match its index"
        tensors.update(content)
    return tensors


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Replace the one weight file of a checkpoint."""
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def write_shards(folder: Path, tensors: dict[str, Tensor], count: int) -> None:
    """Replace the one weight file of a checkpoint by `count` shards, neighbours in different files."""
    (Path(folder) / "model.safetensors").unlink()
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = dict(list(tensors.items())[number::count])
        save_file(part, Path(folder) / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: NaN payloads and signs of zeros count."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, f"{name}: {actual[name].dtype}, not {tensor.dtype}"
        assert actual[name].shape == tensor.shape, f"{name}: {tuple(actual[name].shape)}, not {tuple(tensor.shape)}"
        assert torch.equal(bits(actual[name]), bits(tensor)), f"{name}: values changed"


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE, what: str = "value") -> None:
    """Equal within `tolerance`, relative to the largest element."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)}, not {tuple(expected.shape)}"
    error = (actual.detach().double() - expected.detach().double()).abs().max().item()
    scale = max(expected.detach().abs().max().item(), 1e-6)
    assert error <= tolerance * scale, f"{what}: relative error {error / scale:.3g} above {tolerance:.3g}"


def export(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The tensors that save_pretrained writes."""
    model.save_pretrained(folder)
    return read_tensors(folder)


def token_batch(rows: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    """Random ids without the special ones."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
