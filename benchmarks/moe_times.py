"""The op fused_moe alone, forwards and backwards, against the experts modules of transformers and Liger-Kernel.

    PYTHONPATH=. python benchmarks/moe_times.py --output moe_times.json

README.md in this folder says what is measured.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")  # Liger-Kernel reads it when it is imported

import torch
from environment import add_output_arguments, describe, environment, markdown_table, recorded, write_report
from timing import milliseconds
from torch import Tensor, nn
from triton.errors import TritonError

from liger_models import ops
from liger_models.kernels.fused_moe import fused_moe

# What a missing or broken implementation raises; such a row holds the error and the others go on.
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, ImportError, AssertionError, KeyError, TritonError)
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """The routed experts of a model. With `clamped` they are those of GPT-OSS: biases, limit, offset."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    clamped: bool

    @property
    def operations(self) -> int:
        """Of three matrix products forwards; backwards there are twice as many."""
        return 6 * self.tokens * self.top_k * self.hidden * self.intermediate

    @property
    def options(self) -> dict[str, float]:
        return {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0} if self.clamped else {}


SHAPES = {
    "gpt-oss-20b": Shape(4096, 2880, 2880, 32, 4, True),
    "qwen3-30b-a3b": Shape(8192, 2048, 768, 128, 8, False),
    "tiny gpt-oss": Shape(24, 32, 48, 4, 2, True),
    "tiny qwen3": Shape(24, 32, 48, 8, 4, False),
}
LARGE = tuple(name for name in SHAPES if not name.startswith("tiny"))


def main() -> None:
    options = parse()
    report = {"environment": environment(options.device, options.commit), "options": recorded(options), "rows": []}
    for name in options.shapes:
        torch.manual_seed(options.seed)
        for row in compare(SHAPES[name], options):
            report["rows"].append({"shape": name, **row})
            write_report(report, options.output, markdown(report))  # after each row: what is measured stays
    print(markdown(report))


def parse() -> argparse.Namespace:
    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default=LARGE, type=names, help=f"comma-separated, of {', '.join(SHAPES)}")
    parser.add_argument("--providers", default=tuple(PROVIDERS), type=names, help=f"comma-separated, of {', '.join(PROVIDERS)}")
    add_output_arguments(parser, "moe_times.json")
    options = parser.parse_args()
    for given, known in ((options.shapes, SHAPES), (options.providers, PROVIDERS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    return options


def inputs(shape: Shape, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The experts of each token, drawn evenly, and the op's other tensors: all inside are of size one."""

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

    scores, expert_ids = torch.randn(shape.tokens, shape.experts, device=device).topk(shape.top_k)
    tensors = {
        "x": draw(shape.tokens, shape.hidden),
        "expert_weights": scores.softmax(-1).bfloat16(),
        "gate_up_weight": draw(shape.experts, 2 * shape.intermediate, shape.hidden).mul_(shape.hidden**-0.5),
        "down_weight": draw(shape.experts, shape.hidden, shape.intermediate).mul_(shape.intermediate**-0.5),
    }
    if shape.clamped:
        tensors["gate_up_bias"] = draw(shape.experts, 2 * shape.intermediate)
        tensors["down_bias"] = draw(shape.experts, shape.hidden)
    return expert_ids, tensors


# ---------------------------------------------------------------------------------------------------------------------
# The providers: each makes a function of the op's tensors in its own layout, and says how it lays out a tensor


def as_it_is(_name: str, tensor: Tensor) -> Tensor:
    return tensor


def interleaved(name: str, tensor: Tensor) -> Tensor:
    """GPT-OSS: gate and up alternate, and weights are [experts, in, out]."""
    if name.startswith("gate_up"):
        tensor = torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)
    return tensor.transpose(1, 2).contiguous() if tensor.dim() == 3 else tensor


def native(shape: Shape, expert_ids: Tensor) -> tuple[Callable, Callable]:
    return lambda **tensors: ops.fused_moe(expert_ids=expert_ids, **tensors, **shape.options), as_it_is


def stock(implementation: str) -> Callable:
    """The experts module of transformers; models take "grouped_mm" unless told otherwise, the module alone "eager"."""

    def provider(shape: Shape, expert_ids: Tensor) -> tuple[Callable, Callable]:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = stock_configuration(shape)
        config._experts_implementation = implementation
        function = of_module(GptOssExperts if shape.clamped else Qwen3MoeExperts, config, expert_ids)
        return function, interleaved if shape.clamped else as_it_is

    return provider


def liger(shape: Shape, expert_ids: Tensor) -> tuple[Callable, Callable]:
    if shape.clamped:
        raise ValueError("LigerExperts has no biases and no clamped activation")
    from liger_kernel.transformers.swiglu import LigerExperts

    return of_module(LigerExperts, stock_configuration(shape), expert_ids), as_it_is


def stock_configuration(shape: Shape):
    from transformers import GptOssConfig, Qwen3MoeConfig

    sizes = {"hidden_size": shape.hidden, "num_experts_per_tok": shape.top_k, "num_hidden_layers": 1}
    if shape.clamped:
        return GptOssConfig(**sizes, intermediate_size=shape.intermediate, num_local_experts=shape.experts)
    return Qwen3MoeConfig(**sizes, moe_intermediate_size=shape.intermediate, num_experts=shape.experts)


PARAMETERS = {
    "gate_up_weight": "gate_up_proj", "down_weight": "down_proj", "gate_up_bias": "gate_up_proj_bias",
    "down_bias": "down_proj_bias",
}  # fmt: skip


def of_module(experts_class: type[nn.Module], config, expert_ids: Tensor) -> Callable:
    with torch.device("meta"):  # its parameters are replaced
        module = experts_class(config)

    def function(x: Tensor, expert_weights: Tensor, **weights: Tensor) -> Tensor:
        parameters = {PARAMETERS[name]: weight for name, weight in weights.items()}
        return torch.func.functional_call(module, parameters, (x, expert_ids, expert_weights))

    return function


PROVIDERS: dict[str, Callable] = {
    "native": native, "stock@eager": stock("eager"), "stock@grouped_mm": stock("grouped_mm"), "liger-kernel": liger,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def compare(shape: Shape, options: argparse.Namespace) -> Iterator[dict]:
    """A row for each provider: times in ms, rates in TFLOP/s, memory, errors; or why there is none."""
    expert_ids, tensors = inputs(shape, options.device)
    dy = torch.randn(shape.tokens, shape.hidden, device=options.device, dtype=torch.bfloat16)
    expected = in_float64(shape, expert_ids, tensors, dy)
    for name in options.providers:
        started = time.perf_counter()
        try:
            function, layout = PROVIDERS[name](shape, expert_ids)
            row = measure(shape, function, layout, tensors, dy, expected)
        except FAILURES as error:
            row = {"error": f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:300]}"}
        yield {"provider": name, **row, "seconds": round(time.perf_counter() - started, 2)}


def measure(shape: Shape, function: Callable, layout: Callable, tensors: dict, dy: Tensor, expected: dict) -> dict:
    given = {name: layout(name, tensor).detach().requires_grad_() for name, tensor in tensors.items()}
    leaves = list(given.values())

    def forward() -> Tensor:
        return function(**given)

    output = forward()
    results = {"output": output.detach(), **dict(zip(given, torch.autograd.grad(output, leaves, dy)))}
    errors = {name: relative_error(results[name], layout(name, value)) for name, value in expected.items()}
    del output, results
    memory = extra_memory(lambda: torch.autograd.grad(forward(), leaves, dy), dy.device)
    times = {"forward": milliseconds(forward, dy.device.type, warmup=50, rep=300)}
    output = forward()
    times["backward"] = milliseconds(
        lambda: torch.autograd.grad(output, leaves, dy, retain_graph=True), dy.device.type, warmup=50, rep=300
    )
    operations = {"forward": shape.operations, "backward": 2 * shape.operations}
    return {
        **{f"{part}_ms": value for part, value in times.items()},
        **{f"{part}_tflops": operations[part] / times[part] / 1e9 for part in times},
        "total_ms": sum(times.values()),
        "extra_bytes": memory,
        "errors": errors,
    }


def in_float64(shape: Shape, expert_ids: Tensor, tensors: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    """Output and gradients of the reference. In fp32 they are kept: exact enough to be compared with bf16, half as large."""
    exact = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    output = fused_moe(expert_ids=expert_ids, **exact, **shape.options)
    gradients = torch.autograd.grad(output, list(exact.values()), dy.double())
    return {"output": output.detach().float(), **{name: g.float() for name, g in zip(exact, gradients)}}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected).norm() / expected.norm()).item()


def extra_memory(function: Callable, device: torch.device) -> int | None:
    """Bytes at the peak of a warm call beyond what there was before it; None on CPU."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# ---------------------------------------------------------------------------------------------------------------------
# Report

HEADER = [
    "shape", "provider", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "both ms", "extra GiB", "largest error",
]  # fmt: skip


def markdown(report: dict) -> str:
    rows = [cells(row) for row in report["rows"] if "error" not in row]
    reasons = [f"- no figures for {r['shape']}, {r['provider']}: {r['error']}" for r in report["rows"] if "error" in r]
    counted = "bf16. TFLOP/s count 6·tokens·top_k·hidden·intermediate operations forwards, twice as many backwards."
    return "\n".join([counted, "", markdown_table(HEADER, rows), "", *reasons, "", describe(report["environment"])])


def cells(row: dict) -> list[str]:
    worst = max(row["errors"], key=lambda name: row["errors"][name] if row["errors"][name] == row["errors"][name] else 1e30)
    numbers = [f"{row[key]:.4g}" for key in ("forward_ms", "forward_tflops", "backward_ms", "backward_tflops", "total_ms")]
    extra = "" if row["extra_bytes"] is None else f"{row['extra_bytes'] / GIB:.3g}"
    return [row["shape"], row["provider"], *numbers, extra, f"{row['errors'][worst]:.1e} {worst}"]


if __name__ == "__main__":
    main()
