"""Each op of the kernel set alone, forwards and backwards: torch reference, native, Liger-Kernel; time, memory, error.

    PYTHONPATH=. python benchmarks/op_times.py --output op_times.json

README.md in this folder says what is measured. (This file must not be called kernels.py: it would stand in for the Hugging
Face package of that name.)
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import timing
import torch
from environment import add_output_arguments, describe, environment, markdown_table, recorded, write_report
from torch import Tensor
from triton.errors import TritonError

from liger_models import ops
from liger_models.kernels.registry import contracts

# Measured on one H200 (2026-12-01, torch 2.11.0+cu130): a large device-to-device copy, bytes read plus bytes written, and a
# bf16 matrix product 8192 x 8192 x 8192. A floor is bytes over the one or operations over the other, whichever is longer.
COPY_RATE = 4.16e12
PEAK_FLOPS = 786e12
PROVIDERS = ("torch", "torch.compile", "native", "liger-kernel")
# What a missing or broken implementation raises; such a row holds the error and the others go on.
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, ImportError, AssertionError, TritonError)


@dataclass(frozen=True)
class Size:
    """Sizes of the cases: those of Llama3-8B on 8192 tokens, doubled rows where data would fit the cache, or tiny ones."""

    batch: int = 4
    length: int = 2048
    hidden: int = 4096
    intermediate: int = 14336
    vocabulary: int = 128256
    heads: int = 32
    key_value_heads: int = 8
    head_dim: int = 128

    @property
    def tokens(self) -> int:
        return self.batch * self.length


SIZES = {"llama3-8b": Size(), "tiny": Size(2, 8, 32, 64, 96, 4, 2, 16)}


@dataclass(frozen=True)
class Case:
    """An op with its arguments and the least work that it can do.

    Attributes:
        arguments: by the contract's names. Floating-point tensors named in the contract as differentiable get gradients.
        work: (bytes, operations) of forward and of backward: each input read once, each output written once.
        liger: the same from Liger-Kernel, or None where it has none.
        liger_arguments: what `liger` takes, where that differs from `arguments`.
        graph: timed by a CUDA graph, which leaves launches out; not where an implementation synchronises with the host or
            takes so long that launches do not matter.
    """

    name: str
    arguments: dict
    forward_work: tuple[float, float]
    backward_work: tuple[float, float]
    liger: Callable | None = None
    liger_arguments: dict | None = None
    graph: bool = True


def main() -> None:
    options = parse()
    size = SIZES[options.size]
    report = {"environment": environment(options.device, options.commit), "options": recorded(options), "rows": []}
    for name in options.ops:
        for provider in options.providers if name in contracts() else ():
            started = time.perf_counter()
            row = {"op": name, "provider": provider, **run(name, provider, size, options)}
            report["rows"].append({**row, "seconds": round(time.perf_counter() - started, 2)})
        if name not in contracts():
            report["rows"].append({"op": name, "provider": "any", "error": "the kernel set has no such op yet"})
        write_report(report, options.output, markdown(report))  # after each op: what is measured stays
    print(markdown(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", default=tuple(CASES), type=lambda text: tuple(text.split(",")), help="comma-separated")
    parser.add_argument(
        "--providers",
        default=("torch", "native", "liger-kernel"),
        type=lambda text: tuple(text.split(",")),
        help=f"comma-separated, of {', '.join(PROVIDERS)}",
    )
    parser.add_argument("--size", default="llama3-8b", choices=tuple(SIZES))
    add_output_arguments(parser, "op_times.json")
    options = parser.parse_args()
    for given, known in ((options.ops, CASES), (options.providers, PROVIDERS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    return options


# ---------------------------------------------------------------------------------------------------------------------
# The cases

BYTES = 2  # of a bf16 element


def tensor(*shape: int, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).to(torch.bfloat16)


def rotation(size: Size, device: str) -> dict:
    """cos and sin of [1, length, head_dim], the two halves equal, as stock Llama computes them."""
    frequencies = 500000.0 ** (-torch.arange(0, size.head_dim, 2, device=device) / size.head_dim)
    angles = torch.outer(torch.arange(size.length, device=device), frequencies).repeat(1, 2)[None]
    return {"cos": angles.cos().to(torch.bfloat16), "sin": angles.sin().to(torch.bfloat16)}


def rms_norm(size: Size, device: str) -> Case:
    rows = 2 * size.tokens
    moved = rows * size.hidden * BYTES

    def liger(x, weight, eps):
        from liger_kernel.ops import LigerRMSNormFunction

        return LigerRMSNormFunction.apply(x, weight, eps)

    arguments = {"x": tensor(rows, size.hidden, device=device), "weight": 1 + tensor(size.hidden, device=device, scale=0.1)}
    # forward: x in, y out; backward: dy and x in, dx out
    return Case("rms_norm", {**arguments, "eps": 1e-5}, (2 * moved, 0), (3 * moved, 0), liger)


def fused_add_rms_norm(size: Size, device: str) -> Case:
    rows = 2 * size.tokens
    moved = rows * size.hidden * BYTES

    def liger(x, residual, weight, eps):
        from liger_kernel.ops import LigerFusedAddRMSNormFunction

        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps)

    arguments = {
        "x": tensor(rows, size.hidden, device=device),
        "residual": tensor(rows, size.hidden, device=device),
        "weight": 1 + tensor(size.hidden, device=device, scale=0.1),
    }
    # forward: x and residual in, sum and norm out; backward: both gradients and the sum in, one gradient out for both
    return Case("fused_add_rms_norm", {**arguments, "eps": 1e-5}, (4 * moved, 0), (4 * moved, 0), liger)


def rope(size: Size, device: str) -> Case:
    def liger(q, k, cos, sin):
        from liger_kernel.ops import LigerRopeFunction

        return LigerRopeFunction.apply(q, k, cos, sin)

    def heads(count):  # [batch, heads, length, head_dim], laid out as a projection leaves it
        return tensor(2 * size.batch, size.length, count, size.head_dim, device=device).transpose(1, 2)

    arguments = {"q": heads(size.heads), "k": heads(size.key_value_heads), **rotation(size, device)}
    moved = 2 * size.tokens * (size.heads + size.key_value_heads) * size.head_dim * BYTES
    return Case("rope", arguments, (2 * moved, 0), (2 * moved, 0), liger)


def qkv_rope(size: Size, device: str) -> Case:
    width = (size.heads + 2 * size.key_value_heads) * size.head_dim

    def liger(qkv, cos, sin, num_heads, num_key_value_heads):
        from liger_kernel.ops import LigerRopeFunction

        parts = (num_heads * size.head_dim, num_key_value_heads * size.head_dim, num_key_value_heads * size.head_dim)
        q, k, v = (part.unflatten(-1, (-1, size.head_dim)).transpose(1, 2) for part in qkv.split(parts, dim=-1))
        return *LigerRopeFunction.apply(q, k, cos, sin), v

    arguments = {
        "qkv": tensor(2 * size.batch, size.length, width, device=device),
        **rotation(size, device),
        "num_heads": size.heads,
        "num_key_value_heads": size.key_value_heads,
    }
    moved = 2 * size.tokens * width * BYTES  # q, k and v, in and out, both ways
    return Case("qkv_rope", arguments, (2 * moved, 0), (2 * moved, 0), liger)


def activation(name: str, size: Size, device: str) -> Case:
    def liger(gate, up):
        from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

        return (LigerSiLUMulFunction if name == "swiglu" else LigerGELUMulFunction).apply(gate, up)

    shape = (size.tokens, size.intermediate)
    moved = size.tokens * size.intermediate * BYTES
    arguments = {"gate": tensor(*shape, device=device), "up": tensor(*shape, device=device)}
    # forward: two in, one out; backward: output gradient and both inputs in, two gradients out
    return Case(name, arguments, (3 * moved, 0), (5 * moved, 0), liger)


def swiglu(size: Size, device: str) -> Case:
    return activation("swiglu", size, device)


def geglu(size: Size, device: str) -> Case:
    return activation("geglu", size, device)


def gated_mlp(size: Size, device: str) -> Case:
    def liger(x, gate_weight, up_weight, down_weight):
        from liger_kernel.ops import LigerSiLUMulFunction

        linear = torch.nn.functional.linear
        return linear(LigerSiLUMulFunction.apply(linear(x, gate_weight), linear(x, up_weight)), down_weight)

    gate_up = tensor(2 * size.intermediate, size.hidden, device=device, scale=0.02)
    gate, up = gate_up.chunk(2)
    shared = {
        "x": tensor(size.tokens, size.hidden, device=device),
        "down_weight": tensor(size.hidden, size.intermediate, device=device, scale=0.02),
    }
    operations = 2 * size.tokens * size.hidden * 3 * size.intermediate
    return Case(
        "gated_mlp",
        {"gate_up_weight": gate_up, **shared},
        (0, operations),
        (0, 2 * operations),  # a gradient of the input and one of the weight for each product
        liger,
        liger_arguments={"gate_weight": gate, "up_weight": up, **shared},  # two projections, as its module has
        graph=False,
    )


def cross_entropy(size: Size, device: str) -> Case:
    def liger(logits, target):
        from liger_kernel.ops import LigerCrossEntropyFunction

        return LigerCrossEntropyFunction.apply(logits, target, None)[0]

    logits = tensor(size.tokens, size.vocabulary, device=device)
    target = torch.randint(size.vocabulary, (size.tokens,), device=device)
    moved = logits.numel() * BYTES
    # logits in, their gradient out. An implementation that writes the gradient in forward does all of its work there.
    return Case("cross_entropy", {"logits": logits, "target": target}, (moved, 0), (moved, 0), liger, graph=False)


def fused_linear_cross_entropy(size: Size, device: str) -> Case:
    def liger(hidden, weight, target):
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

        return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]

    arguments = {
        "hidden": tensor(size.tokens, size.hidden, device=device),
        "weight": tensor(size.vocabulary, size.hidden, device=device, scale=0.02),
        "target": torch.randint(size.vocabulary, (size.tokens,), device=device),
    }
    operations = 2 * size.tokens * size.hidden * size.vocabulary
    name = "fused_linear_cross_entropy"
    return Case(name, arguments, (0, operations), (0, 2 * operations), liger, graph=False)


def embedding(size: Size, device: str) -> Case:
    def liger(indices, weight):
        from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

        return LigerEmbeddingFunction.apply(weight, indices)

    arguments = {
        "indices": torch.randint(size.vocabulary, (size.batch, size.length), device=device),
        "weight": tensor(size.vocabulary, size.hidden, device=device),
    }
    rows = size.tokens * size.hidden * BYTES
    # forward: rows in, rows out; backward: their gradients in, the whole weight's gradient out
    table = size.vocabulary * size.hidden * BYTES
    return Case("embedding", arguments, (2 * rows, 0), (rows + table, 0), liger, graph=False)


CASES: dict[str, Callable[[Size, str], Case]] = {
    case.__name__: case
    for case in (
        rms_norm, fused_add_rms_norm, qkv_rope, rope, swiglu, geglu, gated_mlp, cross_entropy, fused_linear_cross_entropy,
        embedding,
    )
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# One op from one provider


def run(name: str, provider: str, size: Size, options: argparse.Namespace) -> dict:
    """The row of an op and a provider: errors, times, memory; or why there is none."""
    torch.manual_seed(options.seed)
    case = CASES[name](size, options.device)
    try:
        function, arguments, backend = provided(case, provider, options.device)
        differentiable = [key for key, value in arguments.items() if isinstance(value, Tensor) and value.is_floating_point()]
        if provider != "liger-kernel" or case.liger_arguments is None:
            differentiable = [key for key in differentiable if key in contracts()[name].differentiable]
        return {"backend": backend, **measure(case, function, arguments, differentiable, options.device)}
    except FAILURES as error:
        return {"error": f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:300]}"}
    finally:
        if options.device == "cuda":
            torch.cuda.empty_cache()


def provided(case: Case, provider: str, device: str) -> tuple[Callable, dict, str]:
    """The provider's function, its arguments, and what serves it."""
    reference = contracts()[case.name].reference
    if provider == "torch":
        return reference, case.arguments, "torch"
    if provider == "torch.compile":
        torch.compiler.reset()
        return torch.compile(reference, dynamic=False), case.arguments, "torch.compile"
    if provider == "native":
        return getattr(ops, case.name), case.arguments, ops.resolve(device).choices[case.name].backend
    if case.liger is None:
        raise ValueError("Liger-Kernel has no such op")
    return case.liger, case.liger_arguments or case.arguments, "liger-kernel"


def measure(case: Case, function: Callable, arguments: dict, differentiable: list[str], device: str) -> dict:
    """Error against the reference in float64, then times in ms, then memory in GiB beyond what was there before."""
    row = {"errors": errors(case, function, arguments, differentiable)}
    values, leaves = leaves_of(arguments, differentiable)
    outputs = outputs_of(function, values)
    gradients = output_gradients(outputs)

    def forward():
        return outputs_of(function, values)

    def both():
        torch.autograd.grad([o for o in forward() if o.requires_grad], leaves, gradients)

    del outputs
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        row["extra_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    row["forward_ms"], row["timer"] = milliseconds(forward, device, case.graph)
    row["total_ms"], _ = milliseconds(both, device, case.graph)
    row["backward_ms"] = row["total_ms"] - row["forward_ms"]
    row["total_with_launches_ms"] = milliseconds(both, device, graph=False)[0] if case.graph else row["total_ms"]
    total_work = tuple(map(sum, zip(case.forward_work, case.backward_work)))
    for part, work in (("forward", case.forward_work), ("backward", case.backward_work), ("total", total_work)):
        floor = max(work[0] / COPY_RATE, work[1] / PEAK_FLOPS) * 1000
        row[f"{part}_floor_ms"] = floor
        row[f"{part}_share_of_floor"] = floor / row[f"{part}_ms"] if device == "cuda" and row[f"{part}_ms"] > 0 else None
    return row


def errors(case: Case, function: Callable, arguments: dict, differentiable: list[str]) -> dict:
    """‖actual − reference‖ / ‖reference‖ of each output and gradient. The reference runs in float64 on the same device."""
    contract = contracts()[case.name]
    wanted = [name for name in contract.differentiable if isinstance(case.arguments.get(name), Tensor)]
    doubled = {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in case.arguments.items()
    }
    expected = outputs_and_gradients(contract.reference, doubled, wanted)
    actual = outputs_and_gradients(function, arguments, differentiable)
    result = {}
    for name, value in actual.items():
        if name in expected:
            difference = (value.double() - expected[name]).norm() / expected[name].norm()
            result[name] = difference.item()
    return result


def outputs_and_gradients(function: Callable, arguments: dict, differentiable: list[str]) -> dict[str, Tensor]:
    values, leaves = leaves_of(arguments, differentiable)
    outputs = outputs_of(function, values)
    result = {f"output {index}": output.detach().clone() for index, output in enumerate(outputs)}
    gradients = torch.autograd.grad([o for o in outputs if o.requires_grad], leaves, output_gradients(outputs))
    return {**result, **{f"gradient of {name}": gradient for name, gradient in zip(differentiable, gradients)}}


def leaves_of(arguments: dict, differentiable: list[str]) -> tuple[dict, list[Tensor]]:
    """Fresh copies, strides kept: some implementations write over their inputs."""
    values = {
        key: value.detach().clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value
        for key, value in arguments.items()
    }
    leaves = [values[name].requires_grad_() for name in differentiable]
    return values, leaves


def outputs_of(function: Callable, values: dict) -> tuple[Tensor, ...]:
    outputs = function(**values)
    return tuple(o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o is not None)


def output_gradients(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Random gradients that depend on the shapes alone, laid out as the outputs; 1 for a loss."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    return [
        torch.ones_like(o)
        if o.dim() == 0
        else torch.empty_like(o).copy_(torch.randn(o.shape, generator=generator, device=o.device).to(torch.bfloat16))
        for o in outputs
        if o.requires_grad
    ]


def milliseconds(function: Callable, device: str, graph: bool) -> tuple[float, str]:
    """Median time of a call and how it was taken: replays of a CUDA graph, events around calls, or the host's clock."""
    if device != "cpu" and graph:
        from triton.testing import do_bench_cudagraph

        return do_bench_cudagraph(function, rep=5, return_mode="median"), "graph"
    return timing.milliseconds(function, device, warmup=10, rep=60), "host clock" if device == "cpu" else "events"


# ---------------------------------------------------------------------------------------------------------------------
# Report

HEADER = [
    "op", "provider", "forward ms", "of floor", "backward ms", "of floor", "both ms", "of floor", "with launches",
    "extra GiB", "largest error",
]  # fmt: skip


def markdown(report: dict) -> str:
    rows = report["rows"]
    failed = [f"{row['op']}, {row['provider']}: {row['error']}" for row in rows if "error" in row]
    lines = [
        f"Sizes {report['options']['size']}, bf16. 'of floor': the least time (bytes at {COPY_RATE / 1e12:.2f} TB/s, "
        f"operations at {PEAK_FLOPS / 1e12:.0f} TFLOP/s) over the time measured; higher is better. Errors against float64.",
        "",
        markdown_table(HEADER, [cells(row) for row in rows if "error" not in row]),
        "",
        *[f"- no figures for {line}" for line in failed],
        "",
        describe(report["environment"]),
    ]
    return "\n".join(lines)


def cells(row: dict) -> list[str]:
    worst = max(row["errors"], key=lambda name: row["errors"][name] if row["errors"][name] == row["errors"][name] else 1e30)
    provider = row["provider"] if row["provider"] != "native" else f"native ({row['backend']})"
    result = [row["op"], provider]
    for part in ("forward", "backward", "total"):
        share = row[f"{part}_share_of_floor"]
        result += [f"{row[f'{part}_ms']:.4g}", "-" if share is None else f"{share:.0%}"]
    extra = f"{row['extra_gib']:.3f}" if "extra_gib" in row else "-"
    return [*result, f"{row['total_with_launches_ms']:.4g}", extra, f"{row['errors'][worst]:.1e} {worst}"]


if __name__ == "__main__":
    main()
