"""The families under test: one row per native family, and per family the configurations that its tests run on.

A later family adds a `Family` and its cases; every test of this folder then applies to it by itself.
"""

import os
from dataclasses import dataclass, field

import torch
import transformers

import liger_models

_ENDINGS = {"base": "Model", "causal_lm": "ForCausalLM", "sequence_classification": "ForSequenceClassification"}


@dataclass(frozen=True)
class Family:
    """The classes of one family, by name: what transformers has, and what this package has."""

    name: str
    configuration: str
    heads: dict[str, str] = field(hash=False)  # "base", "causal_lm", "sequence_classification" -> stock class
    native_stem: str
    modelling: str  # the module of the stock classes; native classes must not need it
    attentions: tuple[str, ...] = ("eager", "sdpa")  # that the stock classes run on any device
    experts: bool = False  # whether it is a mixture

    def stock(self, head: str) -> type:
        """The stock class of a head."""
        return getattr(transformers, self.heads[head])

    def native(self, head: str) -> type:
        """The native class of a head."""
        return getattr(liger_models, self.native_stem + _ENDINGS[head])


@dataclass(frozen=True)
class Case:
    """One tiny configuration of a family. `main` cases run through every test, the others through the tests of numbers."""

    family: Family
    name: str
    options: dict = field(hash=False)
    main: bool = False

    def __str__(self) -> str:
        return f"{self.family.name}-{self.name}"

    def without_routing(self) -> dict:
        """Options under which every token goes to every expert of a mixture. Where rounding changes a token's experts, results
        jump, and an error says nothing about how exact a model is."""
        return {"num_experts_per_tok": self.configuration().num_local_experts} if self.family.experts else {}

    def configuration(self) -> transformers.PreTrainedConfig:
        """A new stock configuration."""
        return getattr(transformers, self.family.configuration)(**self.options)


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill all parameters with values under which every one of them matters.

    Fresh models have norm weights and biases of one value each, which hide a weight that is not loaded, and projections so
    small that attention is uniform. Norm weights and biases stay near the value that they have when fresh.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                values *= 1.5 * parameter.shape[-1] ** -0.5
            else:
                values = parameter.cpu() + 0.3 * values
            parameter.copy_(values)


def _family(
    name: str, stem: str, attentions: tuple[str, ...] = ("eager", "sdpa"), experts: bool = False, **different: str
) -> Family:
    """A family whose stock classes are named after `stem`, but for those that are `different`."""
    return Family(
        name=name,
        configuration=different.get("configuration", f"{stem}Config"),
        heads={
            "base": different.get("base", f"{stem}Model"),
            "causal_lm": f"{stem}ForCausalLM",
            "sequence_classification": different.get("sequence_classification", f"{stem}ForSequenceClassification"),
        },
        native_stem=f"Liger{stem}",
        modelling=f"transformers.models.{name}.modeling_{name}",
        attentions=attentions,
        experts=experts,
    )


LLAMA = _family("llama", "Llama")
QWEN2 = _family("qwen2", "Qwen2")
QWEN3 = _family("qwen3", "Qwen3")
GEMMA = _family("gemma", "Gemma")
GEMMA2 = _family("gemma2", "Gemma2", attentions=("eager",))  # sdpa cannot cap scores
GEMMA3 = _family(
    "gemma3",
    "Gemma3",
    configuration="Gemma3TextConfig",
    base="Gemma3TextModel",
    sequence_classification="Gemma3TextForSequenceClassification",
)
QWEN3_MOE = _family("qwen3_moe", "Qwen3Moe", experts=True)
GPT_OSS = _family("gpt_oss", "GptOss", attentions=("eager",), experts=True)  # sdpa has no sinks
GLM = _family("glm", "Glm")
GLM4 = _family("glm4", "Glm4")

_TINY = dict(
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

# Windows of 5 are shorter than every sequence of these tests.

_QWEN2_CASES: dict[str, dict] = {
    "2.5": dict(tie_word_embeddings=True),
    "windows": dict(use_sliding_window=True, max_window_layers=1, sliding_window=5),
    "odd": dict(vocab_size=97, hidden_size=42, intermediate_size=44, num_attention_heads=3, num_key_value_heads=1),
    "yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=8),
}
_QWEN2_MAIN = ("windows",)

_QWEN3_CASES: dict[str, dict] = {
    "3": dict(head_dim=12),
    "bias": dict(head_dim=8, attention_bias=True, tie_word_embeddings=True),
    "windows": dict(head_dim=16, use_sliding_window=True, max_window_layers=1, num_hidden_layers=3, sliding_window=5),
    "odd": dict(head_dim=14, hidden_size=42, intermediate_size=44, num_attention_heads=3, num_key_value_heads=3),
}
_QWEN3_MAIN = ("3",)

_GEMMA = dict(head_dim=12, pad_token_id=0, bos_token_id=2, eos_token_id=1)
_GEMMA_CASES: dict[str, dict] = {
    "1": dict(num_key_value_heads=1),
    "bias": dict(attention_bias=True, tie_word_embeddings=False),
    "odd": dict(vocab_size=97, hidden_size=42, intermediate_size=44, num_attention_heads=3, num_key_value_heads=3),
    "relu": dict(hidden_act="relu"),
}
_GEMMA_MAIN = ("1",)

# The caps are low enough to bend scores and logits of these tiny models.
_GEMMA2 = dict(**_GEMMA, sliding_window=5, query_pre_attn_scalar=7, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
_GEMMA2_CASES: dict[str, dict] = {
    "2": dict(),
    "gelu": dict(hidden_activation="gelu", attention_bias=True, tie_word_embeddings=False),
    "uncapped": dict(attn_logit_softcapping=None, final_logit_softcapping=None),
    "odd": dict(vocab_size=97, hidden_size=42, intermediate_size=44, num_attention_heads=3, num_key_value_heads=1),
}
_GEMMA2_MAIN = ("2",)

_GEMMA3 = dict(**_GEMMA, sliding_window=5, sliding_window_pattern=2, query_pre_attn_scalar=7)
_GEMMA3_CASES: dict[str, dict] = {
    "3": dict(),
    "capped": dict(final_logit_softcapping=3.0, hidden_activation="gelu", attention_bias=True),
    "linear": dict(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    ),
    "sliding-only": dict(layer_types=["sliding_attention", "sliding_attention"]),
    "bidirectional": dict(use_bidirectional_attention=True),
    "odd": dict(vocab_size=97, hidden_size=42, intermediate_size=44, num_attention_heads=3, num_key_value_heads=3, head_dim=10),
}
_GEMMA3_MAIN = ("3",)


def _partial(factor: float, **options) -> dict:
    return dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}, **options)


_GLM = dict(head_dim=16)
_GLM_CASES: dict[str, dict] = {
    "half": _partial(0.5),
    "quarter": _partial(0.25, attention_bias=False, num_key_value_heads=1),
    "three-quarters": _partial(0.75, tie_word_embeddings=True),
    "whole": _partial(1.0, hidden_act="gelu"),
    "odd": _partial(0.5, hidden_size=42, intermediate_size=44, num_attention_heads=3, num_key_value_heads=3, head_dim=12),
    "relu": _partial(0.5, hidden_act="relu"),
}
_GLM_MAIN = ("half",)
_GLM4_CASES = {name: options for name, options in _GLM_CASES.items() if name != "relu"}

_QWEN3_MOE = dict(moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2)
_QWEN3_MOE_CASES: dict[str, dict] = {
    "3": dict(norm_topk_prob=True, head_dim=12),
    "dense-blocks": dict(num_hidden_layers=3, mlp_only_layers=[0], decoder_sparse_step=2),
    "windows": dict(use_sliding_window=True, sliding_window=5, norm_topk_prob=True),
    "bias": dict(attention_bias=True, tie_word_embeddings=True),
    "all-experts": dict(num_experts=3, num_experts_per_tok=3),
    "odd": dict(vocab_size=97, hidden_size=40, head_dim=14, num_attention_heads=3, num_key_value_heads=3, num_experts=7),
}
_QWEN3_MOE_MAIN = ("3",)

# Equal hidden and intermediate sizes: a weight that is the wrong way round has the right shape.
_GPT_OSS = dict(
    intermediate_size=32,
    num_local_experts=5,
    num_experts_per_tok=2,
    sliding_window=5,
    head_dim=16,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
)
_GPT_OSS_CASES: dict[str, dict] = {
    "20b": dict(),
    "clamped": dict(swiglu_alpha=1.2, swiglu_limit=0.4, num_hidden_layers=3),
    "no-bias": dict(attention_bias=False, tie_word_embeddings=True),
    "full-only": dict(layer_types=["full_attention", "full_attention"], num_key_value_heads=4),
    "odd": dict(vocab_size=97, hidden_size=40, intermediate_size=56, num_attention_heads=3, num_key_value_heads=1, head_dim=14),
    "one-expert": dict(num_local_experts=4, num_experts_per_tok=1),
}
_GPT_OSS_MAIN = ("20b",)

CASES: list[Case] = [
    Case(family, name, {**_TINY, **common, **options}, name in main)
    for family, common, cases, main in [
        (LLAMA, {}, _LLAMA_CASES, _LLAMA_MAIN),
        (QWEN2, {}, _QWEN2_CASES, _QWEN2_MAIN),
        (QWEN3, {}, _QWEN3_CASES, _QWEN3_MAIN),
        (GEMMA, _GEMMA, _GEMMA_CASES, _GEMMA_MAIN),
        (GEMMA2, _GEMMA2, _GEMMA2_CASES, _GEMMA2_MAIN),
        (GEMMA3, _GEMMA3, _GEMMA3_CASES, _GEMMA3_MAIN),
        (QWEN3_MOE, _QWEN3_MOE, _QWEN3_MOE_CASES, _QWEN3_MOE_MAIN),
        (GPT_OSS, _GPT_OSS, _GPT_OSS_CASES, _GPT_OSS_MAIN),
        (GLM, _GLM, _GLM_CASES, _GLM_MAIN),
        (GLM4, _GLM, _GLM4_CASES, _GLM_MAIN),
    ]
    for name, options in cases.items()
]
MAIN: list[Case] = [case for case in CASES if case.main]
if os.environ.get("LIGER_TEST_CASES") == "main":  # an older transformers differs in what all cases of a family share
    CASES = MAIN
CAUSAL: list[Case] = [case for case in CASES if not case.options.get("use_bidirectional_attention")]
MAIN_ATTENTIONS: list[tuple[Case, str]] = [(case, attention) for case in MAIN for attention in case.family.attentions]
ONE_PER_FAMILY: list[Case] = list({case.family: case for case in reversed(MAIN)}.values())
# What families' heads differ in is tied or not, capped or not; the rest of a head is shared.
HEADS: list[Case] = [case for case in MAIN if case.family in (LLAMA, GEMMA2)]
ONE_PER_HEAD: list[Case] = [case for case in HEADS if case in ONE_PER_FAMILY]
