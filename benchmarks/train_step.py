"""Whole training steps of stock, Liger-Kernel and native models, side by side: time, memory, loss.

    PYTHONPATH=. python benchmarks/train_step.py --shape llama3-8b --batch 4 --length 2048

Every implementation runs in a process of its own, so that neither memory nor patches leak from one to the next. README.md in
this folder says what is measured.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from environment import add_output_arguments, describe, environment, markdown_table, recorded, write_report

# Liger-Kernel tunes its expert kernels in the first step, for minutes; read when it is imported.
os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")

PEAK_FLOPS = 786e12  # bf16 matrix product 8192 x 8192 x 8192 measured on an H200: the base of the utilisation
GIB = 2**30
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
IMPLEMENTATIONS = ("stock", "liger-kernel", "native")
BASELINES = ("stock", "liger-kernel")
OPTIMIZERS = ("adamw-fused", "sgd", "sgd-in-backward", "none")
ATTENTIONS = ("sdpa", "flash_attention_2", "eager", "flex_attention", "liger")


class Shape(NamedTuple):
    """A family (the stock model type), the arguments of its configuration, and of the configuration of its vision encoder.
    Which layers slide the configuration derives from their number, so `--layers` shortens every shape's text model."""

    family: str
    arguments: dict
    text_family: str | None = None  # of a family with images
    vision: dict | None = None


_LLAMA3 = {
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
_LLAMA3_8B = {**_LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128, "num_hidden_layers": 32}
_LLAMA32_1B = {
    **_LLAMA3,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "head_dim": 64,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
_QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_GEMMA2_9B = {
    "vocab_size": 256000,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 42,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_GPT_OSS_20B = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_QWEN3_30B_A3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
_QWEN25_7B = {
    "vocab_size": 151674,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "head_dim": 128,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
_INTERN_VIT_300M = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "image_size": 448,
    "patch_size": 14,
    "attention_bias": True,
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
}
_TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
# Caps and window so small that a tiny model of random weights meets them.
_TINY_GEMMA2 = {
    **_TINY,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 0.5,
}
_TINY_GPT_OSS = {**_TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "tie_word_embeddings": False}
_TINY_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "image_size": 28,
    "patch_size": 7,
    "attention_bias": True,
}
_TINY_QWEN3_MOE = {**_TINY, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
SHAPES = {
    "llama3-8b": Shape("llama", _LLAMA3_8B),
    "llama3.2-1b": Shape("llama", _LLAMA32_1B),
    "qwen3-8b": Shape("qwen3", _QWEN3_8B),
    "gemma2-9b": Shape("gemma2", _GEMMA2_9B),
    "gpt-oss-20b": Shape("gpt_oss", _GPT_OSS_20B),
    "qwen3-30b-a3b": Shape("qwen3_moe", _QWEN3_30B_A3B),
    "internvl3-8b": Shape("internvl", _QWEN25_7B, "qwen2", _INTERN_VIT_300M),
    "tiny": Shape("llama", _TINY),
    "tiny-qwen3": Shape("qwen3", {**_TINY, "head_dim": 32}),
    "tiny-gemma2": Shape("gemma2", _TINY_GEMMA2),
    "tiny-gpt-oss": Shape("gpt_oss", _TINY_GPT_OSS),
    "tiny-qwen3-moe": Shape("qwen3_moe", _TINY_QWEN3_MOE),
    "tiny-internvl": Shape("internvl", _TINY, "qwen2", _TINY_VISION),
}


def main() -> None:
    options = parse()
    if options.worker is not None:
        work(options)
        return
    report = {
        "environment": environment(options.device, options.commit),
        "options": recorded(options),
        "model_flops_per_step": model_flops(config_of(options.shape, options.layers), options),
        "rows": [],
    }
    if options.profile:
        Path(options.profile).write_text("")
    for implementation in options.implementations:
        print(f"-- {implementation}", flush=True)
        report["rows"].append(run_worker(implementation, options))
        compare(report)
        write_report(report, options.output, markdown(report))  # after each row: what is measured stays if the rest is cut off
    print(markdown(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="llama3-8b", choices=tuple(SHAPES))
    parser.add_argument("--layers", type=int, help="number of layers, in place of the shape's own")
    parser.add_argument(
        "--implementations",
        default="stock,liger-kernel,native",
        type=implementations_of,
        help=f"comma-separated, of {', '.join(IMPLEMENTATIONS)}; +compile, then @attention, may follow each",
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--images", type=int, default=6, help="images (tiles) per sequence, for shapes with images")
    parser.add_argument("--optimizer", default="adamw-fused", choices=OPTIMIZERS)
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing of every layer")
    parser.add_argument("--attention", default="sdpa", choices=ATTENTIONS, help="of implementations without @attention")
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--timeout", type=float, default=240, help="seconds that one implementation may take in all")
    parser.add_argument("--profile", help="file for each implementation's kernels of one step, longest first")
    add_output_arguments(parser, "results.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warmup < 1 or options.steps < 1:
        parser.error("--warmup and --steps must be at least 1: the first step compiles")
    return options


class Implementation(NamedTuple):
    """What `native+compile@flex_attention` names."""

    name: str
    compiled: bool
    attention: str | None  # None: the one that --attention names


def implementations_of(text: str) -> list[str]:
    implementations = [part.strip() for part in text.split(",")]
    for implementation in implementations:
        parts_of(implementation)
    return implementations


def parts_of(implementation: str) -> Implementation:
    pattern = rf"({'|'.join(IMPLEMENTATIONS)})(\+compile)?(?:@({'|'.join(ATTENTIONS)}))?"
    match = re.fullmatch(pattern, implementation)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{implementation!r} is none of {', '.join(IMPLEMENTATIONS)}, with or without +compile, then with or without "
            f"@ and one of {', '.join(ATTENTIONS)}"
        )
    return Implementation(match[1], match[2] is not None, match[3])


# ---------------------------------------------------------------------------------------------------------------------
# The parent process: starts a worker per implementation, compares, reports


def run_worker(implementation: str, options: argparse.Namespace) -> dict:
    """The worker's row, or a row with the error that ended it."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", implementation, "--worker-result", str(result)]
        try:
            code = subprocess.run(command, timeout=options.timeout, check=False).returncode
            row = json.loads(result.read_text()) if result.exists() else {"error": f"worker ended with exit code {code}"}
        except subprocess.TimeoutExpired:
            row = {"error": f"no result within {options.timeout:g} s"}
    return {"implementation": implementation, **row, "worker_seconds": round(time.perf_counter() - started, 1)}


def compare(report: dict) -> None:
    """Add what a row is only in relation to: tokens/s, utilisation, ratios to the baselines, differences of losses."""
    options, rows = report["options"], [row for row in report["rows"] if "error" not in row]
    for row in rows:
        seconds = row["step_ms"] / 1000
        row["tokens_per_second"] = options["batch"] * options["length"] / seconds
        if options["device"] == "cuda" and options["dtype"] == "bf16":
            row["model_flop_utilisation"] = report["model_flops_per_step"] / seconds / PEAK_FLOPS
        for name in BASELINES:
            baselines = [other for other in rows if parts_of(other["implementation"]).name == name]
            key = name.replace("-", "_")
            row[f"time_over_{key}"] = over_best(row, baselines, "step_ms")
            row[f"peak_over_{key}"] = over_best(row, baselines, "peak_gib")
        row["loss_difference"] = row["losses"][0] - rows[0]["losses"][0]
        row["last_loss_difference"] = row["losses"][-1] - rows[0]["losses"][-1]


def over_best(row: dict, baselines: list[dict], figure: str) -> float | None:
    """The row's figure over the smallest among the baselines; None where nothing was measured."""
    if row[figure] is None or not baselines:
        return None
    return row[figure] / min(baseline[figure] for baseline in baselines)


def markdown(report: dict) -> str:
    options = report["options"]
    config = config_of(options["shape"], options["layers"])
    layers, size = config.get_text_config().num_hidden_layers, f"{options['batch']}x{options['length']}"
    if has_images(config):
        size += f" with {options['images']} images each through {config.vision_config.num_hidden_layers} layers"
    flops = report["model_flops_per_step"]
    checkpointing = ", gradient checkpointing" if options["checkpointing"] else ""
    lines = [
        f"{options['shape']}, {layers} layers, {size}, {options['dtype']}, "
        f"{options['optimizer']}, attention {options['attention']} where a row names none{checkpointing}; "
        f"median of {options['steps']} steps after {options['warmup']}; {flops / 1e12:.1f} TFLOP a step: "
        f"{flops / PEAK_FLOPS * 1000:.0f} ms at {PEAK_FLOPS / 1e12:.0f} TFLOP/s. /stock and /liger are this row over the best "
        "row of that name, whatever its suffixes: the fastest for time, the smallest for memory. Below 1 is better.",
        "",
        markdown_table(HEADER, [cells(row) for row in report["rows"]]),
        *[f"\n{row['implementation']} failed: {row['error']}" for row in report["rows"] if "error" in row],
        "",
        describe(report["environment"]),
    ]
    return "\n".join(lines)


HEADER = [
    "implementation", "step ms (range)", "/stock", "/liger", "peak GiB", "/stock", "/liger", "reserved",
    "tokens/s", "MFU", "first step s", "first loss", "Δ loss", "Δ last loss",
]  # fmt: skip


def cells(row: dict) -> list[str]:
    if "error" in row:
        return [row["implementation"], "failed", *[""] * (len(HEADER) - 2)]
    return [
        row["implementation"],
        f"{row['step_ms']:.1f} ({min(row['all_step_ms']):.1f}-{max(row['all_step_ms']):.1f})",
        number(row["time_over_stock"], ".3f"),
        number(row["time_over_liger_kernel"], ".3f"),
        number(row["peak_gib"], ".2f"),
        number(row["peak_over_stock"], ".3f"),
        number(row["peak_over_liger_kernel"], ".3f"),
        number(row["reserved_gib"], ".2f"),
        number(row["tokens_per_second"], ",.0f"),
        number(row.get("model_flop_utilisation"), ".1%"),
        number(row["first_step_seconds"], ".1f"),
        f"{row['losses'][0]:.5f}",
        f"{row['loss_difference']:+.1e}",
        f"{row['last_loss_difference']:+.1e}",
    ]


def number(value: float | None, format_: str) -> str:
    return "-" if value is None else format(value, format_)


def config_of(shape: str, layers: int | None):
    """The stock configuration of a shape, with `layers` in place of its own number of layers."""
    from transformers import AutoConfig

    family, arguments, text_family, vision = SHAPES[shape]
    shortened = {} if layers is None else {"num_hidden_layers": layers}
    options = {**arguments, **shortened, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
    if vision is None:
        return AutoConfig.for_model(family, **options)
    text, tied = {"model_type": text_family, **options}, options.get("tie_word_embeddings", False)
    return AutoConfig.for_model(
        family,
        text_config=text,
        vision_config={"model_type": f"{family}_vision", **vision},
        image_token_id=options["vocab_size"] - 1,
        tie_word_embeddings=tied,
    )


def has_images(config) -> bool:
    return hasattr(config, "vision_config")


def image_tokens(config) -> int:
    """How many tokens of the text model an image becomes."""
    vision = config.vision_config
    patches = (vision.image_size[0] // vision.patch_size[0]) * (vision.image_size[1] // vision.patch_size[1])
    return int(patches * config.downsample_ratio**2)


def model_flops(config, options: argparse.Namespace) -> int:
    """step_flops of the text model, and the same of the vision encoder and the projector."""
    flops = step_flops(config.get_text_config(), options.batch, options.length)
    if not has_images(config):
        return flops
    vision, images, hidden = config.vision_config, options.batch * options.images, config.get_text_config().hidden_size
    window, tokens = round(1 / config.downsample_ratio), image_tokens(config)
    length = tokens * window**2 + 1  # and the class token
    layer = 4 * vision.hidden_size**2 + 2 * vision.hidden_size * vision.intermediate_size
    encoder = 6 * layer * length + 3 * 4 * length**2 * vision.hidden_size
    projector = 6 * (vision.hidden_size * window**2 * hidden + hidden**2) * tokens
    return flops + images * (vision.num_hidden_layers * encoder + projector)


def step_flops(config, batch: int, length: int) -> int:
    """Floating-point operations that one step's mathematics needs; what checkpointing recomputes is not counted.

    Products with weights, the head's also where it is tied, of experts those that a token goes to: 2 operations per weight and
    token forwards, twice that backwards.
    Attention: two products per head over the visible pairs of query and key, length²/2 where causal, window·(length - window/2)
    in a sliding window; twice that backwards.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    query = config.num_attention_heads * config.head_dim
    key_value = 2 * config.num_key_value_heads * config.head_dim
    experts = getattr(config, "num_local_experts", 0)
    width = getattr(config, "moe_intermediate_size", config.intermediate_size) if experts else config.intermediate_size
    feed_forward = 3 * hidden * width * (config.num_experts_per_tok if experts else 1) + hidden * experts
    layer = hidden * (query + key_value) + query * hidden + feed_forward
    weights = layers * layer + hidden * config.vocab_size
    attention = 0
    for kind in getattr(config, "layer_types", None) or ["full_attention"] * layers:
        window = min(config.sliding_window, length) if kind == "sliding_attention" else length
        attention += 2 * window * (2 * length - window) * query
    return batch * (6 * weights * length + 3 * attention)


# ---------------------------------------------------------------------------------------------------------------------
# The worker process: one implementation


def work(options: argparse.Namespace) -> None:
    def report_failure(kind, error, trace):
        first_line = (str(error).strip() or "no message").splitlines()[0]
        options.worker_result.write_text(json.dumps({"error": f"{kind.__name__}: {first_line[:400]}"}))
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = report_failure
    row, step = measure(options)
    options.worker_result.write_text(json.dumps(row))
    sys.excepthook = sys.__excepthook__  # the row stays if profiling fails
    if options.profile:
        with open(options.profile, "a") as file:
            file.write(f"# {options.worker}: kernels of one step\n\n{profile(step, options.device)}\n\n")


def measure(options: argparse.Namespace) -> tuple[dict, Callable]:
    """Build the implementation and run its steps. Times in ms, memory in GiB (None on CPU). Returns the row and the step."""
    import torch

    implementation = parts_of(options.worker)
    started = time.perf_counter()
    model = build(implementation, options)
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    step = step_of(model, options, compiled=implementation.compiled)
    build_seconds = time.perf_counter() - started

    started = time.perf_counter()
    losses = [step().item()]
    synchronize(options.device)
    first_step_seconds = time.perf_counter() - started
    losses += [step().item() for _ in range(options.warmup - 1)]
    if options.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times, timed_losses = timed(step, options.steps, options.device)
    row = {
        "step_ms": statistics.median(times),
        "all_step_ms": times,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if options.device == "cuda" else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if options.device == "cuda" else None,
        "first_step_seconds": first_step_seconds,
        "build_seconds": build_seconds,
        "losses": losses + timed_losses,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    return row, step


def build(implementation: Implementation, options: argparse.Namespace):
    """The model of an implementation, on the device, with the weights that every implementation gets."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = config_of(options.shape, options.layers)
    attention = implementation.attention or options.attention
    arguments = {"dtype": getattr(torch, DTYPES[options.dtype]), "attn_implementation": attention}
    without_sdpa = getattr(config, "attn_logit_softcapping", None) or config.model_type == "gpt_oss"
    if implementation.name == "native" and attention == "sdpa" and without_sdpa:
        arguments["attn_implementation"] = None  # the class's own default
    if implementation.name != "native" and attention == "sdpa" and getattr(config, "attn_logit_softcapping", None):
        # transformers before 5.24 would leave the cap out without a word
        raise ValueError(f"sdpa cannot cap the attention scores of {config.model_type}: name @eager or @flex_attention")
    if implementation.name == "native":
        from liger_models.auto import native_class

        create = native_class(config.model_type)._from_config
    elif has_images(config):
        create = AutoModelForImageTextToText.from_config
    else:
        create = AutoModelForCausalLM.from_config
    if implementation.name == "liger-kernel" and not has_images(config):
        liger_kernel_for(config)()
    with torch.device(options.device):
        model = create(config, **arguments)
    if implementation.name == "liger-kernel" and has_images(config):
        liger_kernel_for(config)(model=model)  # without the instance it leaves the text model as it is
    model.load_state_dict(stock_weights(config, arguments["dtype"], options.device, options.seed))
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return model


def liger_kernel_for(config) -> Callable:
    """Liger-Kernel's function that patches a family."""
    return getattr(import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{config.model_type}")


def stock_weights(config, dtype, device: str, seed: int) -> dict:
    """Random weights under the stock names. Each depends on seed and name alone, hence is the same in every process."""
    import torch

    weights = {}
    for name, initial in stock_state(config).items():
        generator = torch.Generator(device).manual_seed(seed + zlib.crc32(name.encode()))
        values = torch.randn(initial.shape, generator=generator, device=device, dtype=dtype)
        if initial.is_meta:
            weights[name] = values.mul_(config.get_text_config().initializer_range)
        else:
            weights[name] = values.mul_(0.1).add_(initial.to(device, dtype))
    if config.tie_word_embeddings and not has_images(config):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def stock_state(config) -> dict:
    """The state dict of a fresh stock model: 1-D parameters with their values (a norm is ones, or zeros where the family adds
    the one itself), all others without, on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

    torch.manual_seed(0)  # sinks are drawn
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if has_images(config) else AutoModelForCausalLM).from_config(config)
    owner = {}  # of each module, the innermost model that it is part of: its class knows how it is initialised
    for inner in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        owner.update(dict.fromkeys(inner.modules(), inner))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1:
                setattr(module, name, torch.nn.Parameter(torch.full(parameter.shape, torch.nan)))
        owner[module]._init_weights(module)
    return model.state_dict()


def step_of(model, options: argparse.Namespace, compiled: bool) -> Callable:
    """A function that runs one whole training step and returns its loss, as a tensor on the device."""
    import torch

    generator = torch.Generator(options.device).manual_seed(options.seed)
    size = (options.batch, options.length)
    vocabulary = model.config.get_text_config().vocab_size
    inputs = {"input_ids": torch.randint(vocabulary, size, generator=generator, device=options.device)}
    inputs["labels"] = inputs["input_ids"]
    if has_images(model.config):
        inputs |= images_of(model, inputs["input_ids"], options, generator)
    optimizer = None
    if options.optimizer == "adamw-fused":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    elif options.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    elif options.optimizer == "sgd-in-backward":
        step_in_backward(model)
    forward = torch.compile(model) if compiled else model

    def step():
        loss = forward(**inputs, use_cache=False).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def images_of(model, tokens, options: argparse.Namespace, generator) -> dict:
    """Random images, their tokens at the start of each sequence, and labels for what follows them."""
    import torch

    count, vision = options.images * image_tokens(model.config), model.config.vision_config
    if count >= options.length:
        raise ValueError(f"{options.images} images take {count} tokens, and sequences have {options.length}: give fewer images")
    tokens = tokens.clamp(max=model.config.image_token_id - 1)  # the last of the vocabulary
    tokens[:, :count] = model.config.image_token_id
    shape = (options.batch * options.images, 3, *vision.image_size)
    pixels = torch.randn(shape, generator=generator, device=options.device, dtype=model.dtype)
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(tokens == model.config.image_token_id, -100),
        "pixel_values": pixels,
    }


def step_in_backward(model) -> None:
    """Each parameter takes its step as soon as its gradient is whole, and the gradient goes: never all gradients at a time."""
    import torch

    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=1e-3, fused=True)

        def step(_, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        parameter.register_post_accumulate_grad_hook(step)


def timed(step: Callable, steps: int, device: str) -> tuple[list[float], list[float]]:
    """Milliseconds and loss of each step. On a GPU nothing waits for the host between steps, as in training."""
    import torch

    if device == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        losses = []
        events[0].record()
        for event in events[1:]:
            losses.append(step())
            event.record()
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in pairwise(events)]
    else:
        moments, losses = [time.perf_counter()], []
        for _ in range(steps):
            losses.append(step())
            moments.append(time.perf_counter())
        times = [(end - start) * 1000 for start, end in pairwise(moments)]
    return times, [loss.item() for loss in losses]


def profile(step: Callable, device: str, rows: int = 40) -> str:
    """A table of what one step ran, longest first: kernels on a GPU, operators on CPU."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        started = time.perf_counter()
        step()
        synchronize(device)
        wall = (time.perf_counter() - started) * 1000
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [e for e in profiler.key_averages() if e.device_type == wanted and not e.is_user_annotation]
    times = [(e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1000 for e in events]
    ranked = sorted(zip(times, events), key=lambda pair: -pair[0])
    total = sum(times)
    table = [[f"{t:.3f}", f"{t / total:.1%}", str(e.count), e.key[:110]] for t, e in ranked[:rows]]
    calls = sum(event.count for event in events)
    title = f"{total:.1f} ms in {calls} calls; {wall:.1f} ms by the host's clock, under the profiler"
    return f"{title}\n\n{markdown_table(['ms', 'share', 'calls', 'kernel'], table)}"


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
