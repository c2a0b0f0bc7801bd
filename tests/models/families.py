"""The families under test: one row per native family, and per family the configurations that its tests run on.

A later family adds a `Family` and its cases; every test of this folder then applies to it by itself.
"""

from dataclasses import dataclass, field

import torch
import transformers

import liger_models


@dataclass(frozen=True)
class Family:
    """The classes of one family, by name: what transformers has, and `Liger` + that name in this package."""

    name: str
    configuration: str
    heads: dict[str, str] = field(hash=False)  # "base", "causal_lm", "sequence_classification" -> stock class
    modelling: str  # the module of the stock classes; native classes must not need it

    def stock(self, head: str) -> type:
        """The stock class of a head."""
        return getattr(transformers, self.heads[head])

    def native(self, head: str) -> type:
        """The native class of a head."""
        return getattr(liger_models, f"Liger{self.heads[head]}")


@dataclass(frozen=True)
class Case:
    """One tiny configuration of a family. `main` cases run through every test, the others through the tests of numbers."""

    family: Family
    name: str
    options: dict = field(hash=False)
    main: bool = False

    def __str__(self) -> str:
        return f"{self.family.name}-{self.name}"

    def configuration(self) -> transformers.PreTrainedConfig:
        """A new stock configuration."""
        return getattr(transformers, self.family.configuration)(**self.options)


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill all parameters with values under which every one of them matters.

    Fresh models have norm weights of one and biases of zero, which hide a weight that is not loaded, and projections so
    small that attention is uniform.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                values *= 1.5 * parameter.shape[-1] ** -0.5
            elif "norm" in name:
                values = 1 + 0.3 * values
            else:
                values *= 0.3
            parameter.copy_(values)


LLAMA = Family(
    name="llama",
    configuration="LlamaConfig",
    heads={
        "base": "LlamaModel",
        "causal_lm": "LlamaForCausalLM",
        "sequence_classification": "LlamaForSequenceClassification",
    },
    modelling="transformers.models.llama.modeling_llama",
)

_LLAMA = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def _rope(kind: str, **options) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


# Lengths of 8 are passed by every sequence of these tests, so that the scalings that depend on the length apply. "3.2" has
# one wavelength above, one below and one between the two bounds of its scaling.
_LLAMA_CASES: dict[str, dict] = {
    "2": dict(num_key_value_heads=4, pad_token_id=None),
    "3": dict(num_hidden_layers=3, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "3.2": dict(
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        **_rope(
            "llama3",
            rope_theta=500000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
    ),
    "linear": _rope("linear", factor=4.0),
    "dynamic": dict(max_position_embeddings=8, **_rope("dynamic", factor=4.0)),
    "yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=8),
    "longrope": dict(
        original_max_position_embeddings=8,
        **_rope(
            "longrope",
            factor=4.0,
            original_max_position_embeddings=8,
            short_factor=[1.0, 1.1, 1.3, 1.5],
            long_factor=[1.0, 2.0, 3.0, 4.0],
        ),
    ),
    "bias": dict(attention_bias=True, mlp_bias=True),
    "attention-bias-tied": dict(attention_bias=True, tie_word_embeddings=True),
    "mlp-bias": dict(mlp_bias=True),
    "head-dim": dict(head_dim=12),
    "one-kv-head": dict(num_key_value_heads=1),
    "odd": dict(vocab_size=97, hidden_size=42, intermediate_size=44, num_attention_heads=3, num_key_value_heads=3),
    "gelu": dict(hidden_act="gelu"),
    "gelu-tanh": dict(hidden_act="gelu_pytorch_tanh", mlp_bias=True),
    "relu": dict(hidden_act="relu"),
}
_LLAMA_MAIN = ("3", "3.2")

CASES: list[Case] = [
    Case(family, name, {**common, **options}, name in main)
    for family, common, cases, main in [(LLAMA, _LLAMA, _LLAMA_CASES, _LLAMA_MAIN)]
    for name, options in cases.items()
]
MAIN: list[Case] = [case for case in CASES if case.main]
ONE_PER_FAMILY: list[Case] = list({case.family: case for case in reversed(MAIN)}.values())
