"""The attention op alone, forwards and backwards, against flex_attention and scaled_dot_product_attention of torch.

    PYTHONPATH=. python benchmarks/attention_times.py --output attention_times.json
    PYTHONPATH=. python benchmarks/attention_times.py --sweep      # the block sizes that the kernels' table is made from

README.md in this folder says what is measured.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from environment import add_output_arguments, describe, environment, markdown_table, recorded, write_report
from timing import milliseconds
from torch import Tensor
from triton.errors import TritonError

from liger_models import ops
from liger_models.kernels.attention import attention

# What a missing or broken implementation raises; such a row holds the error and the others go on.
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, ImportError, AssertionError, TritonError)
KERNELS = ("forward", "query_gradient", "key_value_gradient")


@dataclass(frozen=True)
class Shape:
    """A causal attention of a model; with a window each query sees so many keys, itself included."""

    batch: int
    heads: int
    key_value_heads: int
    head_dim: int
    length: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def visible(self) -> int:
        """Pairs of a query and a key that it sees, over the batch and all heads."""
        seen = min(self.window or self.length, self.length)
        return self.batch * self.heads * (seen * (seen + 1) // 2 + (self.length - seen) * seen)


SHAPES = {
    "gpt-oss window": Shape(1, 64, 8, 64, 4096, window=128, sinks=True),
    "gpt-oss full": Shape(1, 64, 8, 64, 4096, sinks=True),
    "gemma2": Shape(2, 16, 8, 256, 4096, softcap=50.0),
    "llama-8b": Shape(4, 32, 8, 128, 2048),
    "tiny": Shape(2, 4, 2, 16, 24, window=7, softcap=5.0, sinks=True),
    "tiny causal": Shape(2, 4, 2, 16, 24),
}
LARGE = tuple(name for name in SHAPES if not name.startswith("tiny"))


def main() -> None:
    options = parse()
    report = {"environment": environment(options.device, options.commit), "options": recorded(options), "rows": []}
    for name in options.shapes:
        torch.manual_seed(options.seed)
        tensors = inputs(SHAPES[name], options.device)
        rows = sweep(SHAPES[name], tensors) if options.sweep else compare(SHAPES[name], tensors, options)
        for row in rows:
            report["rows"].append({"shape": name, **row})
            write_report(report, options.output, markdown(report))  # after each row: what is measured stays
    print(markdown(report))


def parse() -> argparse.Namespace:
    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default=LARGE, type=names, help=f"comma-separated, of {', '.join(SHAPES)}")
    parser.add_argument("--providers", default=tuple(PROVIDERS), type=names, help=f"comma-separated, of {', '.join(PROVIDERS)}")
    parser.add_argument("--sweep", action="store_true", help="time the native kernels with other block sizes instead")
    add_output_arguments(parser, "attention_times.json")
    options = parser.parse_args()
    for given, known in ((options.shapes, SHAPES), (options.providers, PROVIDERS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    return options


def inputs(shape: Shape, device: str) -> dict[str, Tensor]:
    """q, k, v as a packed projection leaves them, transposed views of [batch, length, heads, head_dim], and the sinks."""

    def heads(count: int) -> Tensor:
        data = torch.randn(shape.batch, shape.length, count, shape.head_dim, device=device, dtype=torch.bfloat16)
        return data.transpose(1, 2).requires_grad_()

    tensors = {"q": heads(shape.heads), "k": heads(shape.key_value_heads), "v": heads(shape.key_value_heads)}
    if shape.sinks:
        tensors["sinks"] = torch.randn(shape.heads, device=device, dtype=torch.bfloat16).requires_grad_()
    return tensors


def intervals(shape: Shape, device: str | torch.device) -> tuple[Tensor, Tensor]:
    last = torch.arange(shape.length, dtype=torch.int32, device=device)[None]
    return (torch.zeros_like(last) if shape.window is None else last - shape.window + 1), last


# ---------------------------------------------------------------------------------------------------------------------
# The providers: each makes a function of q, k, v and sinks that returns [batch, length, heads, head_dim]


def native(shape: Shape, device: str) -> Callable:
    first, last = intervals(shape, device)
    scaling = shape.head_dim**-0.5
    return lambda q, k, v, sinks=None: ops.attention(q, k, v, first, last, None, sinks, scaling, shape.softcap)


def flex(shape: Shape, device: str) -> Callable:
    """flex_attention as a user writes it: the soft cap on scores, the window in the block mask, the sinks after it."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    window, softcap = shape.window, shape.softcap

    def before(_batch, _head, query, key):
        return key <= query

    def within(_batch, _head, query, key):
        return (key <= query) & (key > query - window)

    def capped(score, _batch, _head, _query, _key):
        return softcap * torch.tanh(score / softcap)

    seen = before if window is None else within
    block_mask = create_block_mask(seen, None, None, shape.length, shape.length, device=device)
    score_mod = None if softcap is None else capped

    def function(q, k, v, sinks=None):
        if sinks is None:
            return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True).transpose(1, 2).contiguous()
        output, auxiliary = flex_attention(
            q, k, v, score_mod, block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )  # fmt: skip
        share = torch.sigmoid(auxiliary.lse - sinks.float()[:, None])  # of the keys in the softmax: the sink has the rest
        return (output * share.unsqueeze(-1)).to(q.dtype).transpose(1, 2).contiguous()

    torch.compiler.reset()
    torch._functorch.config.donated_buffer = False  # backward is timed alone, so its buffers are used again
    return torch.compile(function, dynamic=False)


def sdpa(shape: Shape, device: str) -> Callable:
    if shape.window is not None or shape.softcap is not None or shape.sinks:
        raise ValueError("scaled_dot_product_attention has no window without a full mask, no soft cap and no sinks")
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).contiguous()


PROVIDERS: dict[str, Callable[[Shape, str], Callable]] = {"native": native, "flex": flex, "sdpa": sdpa}


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def compare(shape: Shape, tensors: dict[str, Tensor], options: argparse.Namespace) -> Iterator[dict]:
    """A row for each provider: times in ms, rates in TFLOP/s, errors; or why there is none."""
    dy = torch.randn(shape.batch, shape.length, shape.heads, shape.head_dim, device=options.device, dtype=torch.bfloat16)
    expected = first_group_in_float64(shape, tensors, dy)
    for name in options.providers:
        started = time.perf_counter()
        try:
            row = measure(shape, PROVIDERS[name](shape, options.device), tensors, dy, expected)
        except FAILURES as error:
            row = {"error": f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:300]}"}
        yield {"provider": name, **row, "seconds": round(time.perf_counter() - started, 2)}


def measure(shape: Shape, function: Callable, tensors: dict[str, Tensor], dy: Tensor, expected: dict) -> dict:
    def forward() -> Tensor:
        return function(**tensors)

    output, leaves = forward(), list(tensors.values())

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, leaves, dy, retain_graph=True)

    results = first_group(shape, {"output": output.detach(), **dict(zip(tensors, backward()))})
    errors = {name: ((results[name].double() - value).norm() / value.norm()).item() for name, value in expected.items()}
    times = {
        "forward": milliseconds(forward, dy.device.type, warmup=25, rep=100),
        "backward": milliseconds(backward, dy.device.type, warmup=25, rep=100),
    }
    # q·k and weights·v; backwards five products, whatever an implementation computes again
    operations = {"forward": 4 * shape.head_dim * shape.visible, "backward": 10 * shape.head_dim * shape.visible}
    return {
        **{f"{part}_ms": value for part, value in times.items()},
        **{f"{part}_tflops": operations[part] / times[part] / 1e9 for part in times},
        "total_ms": sum(times.values()),
        "errors": errors,
    }


def first_group(shape: Shape, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What belongs to the first sequence and the first key-value head, which depends on nothing else but the sinks' sum."""
    group = shape.heads // shape.key_value_heads
    parts = {"q": group, "k": 1, "v": 1}
    result = {name: tensors[name][:1, :count] for name, count in parts.items()}
    if "output" in tensors:
        result["output"] = tensors["output"][:1, :, :group]
    if "sinks" in tensors and shape.batch == 1:  # else their gradient is a sum over sequences
        result["sinks"] = tensors["sinks"][:group]
    return result


def first_group_in_float64(shape: Shape, tensors: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    """Output and gradients of the reference. All heads at once would not fit the memory."""
    group = shape.heads // shape.key_value_heads
    part = {name: value.detach().double().requires_grad_() for name, value in first_group(shape, tensors).items()}
    sinks = part.get("sinks", tensors["sinks"][:group].detach().double() if shape.sinks else None)
    output = attention(
        part["q"], part["k"], part["v"], *intervals(shape, dy.device), None, sinks, shape.head_dim**-0.5, shape.softcap
    )
    gradients = torch.autograd.grad(output, list(part.values()), dy[:1, :, :group].double())
    return {"output": output.detach(), **dict(zip(part, gradients))}


# ---------------------------------------------------------------------------------------------------------------------
# Other block sizes

# (rows of the tile that stays, which are queries, or keys in the gradient of keys and values; rows of the tiles that pass
# by; warps; stages)
CANDIDATES = [
    (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (128, 32, 8, 3), (128, 64, 4, 2), (128, 64, 4, 3),
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 8, 2),
]  # fmt: skip


def sweep(shape: Shape, tensors: dict[str, Tensor]) -> Iterator[dict]:
    """A row for each kernel and block size: the time of forward, or of a backward for that kernel's gradients alone."""
    from liger_models.kernels.backends.triton import attention as implementation

    for kernel in KERNELS:
        table = implementation.TILES[kernel]
        block = max(64, implementation._head_block(shape.head_dim))
        chosen = table[block]
        for kept, streamed, warps, stages in CANDIDATES:
            queries, keys = (streamed, kept) if kernel == "key_value_gradient" else (kept, streamed)
            candidate = implementation.Tile(queries, keys, warps, stages)
            table[block] = candidate
            try:
                if (
                    implementation.tile(kernel, block, 2, implementation.hardware.shared_memory(tensors["q"].device))
                    != candidate
                ):
                    continue  # it does not fit
                row = {"ms": time_kernel(shape, kernel, tensors)}
            except FAILURES as error:
                row = {"error": f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:100]}"}
            finally:
                table[block] = chosen
            yield {"kernel": kernel, "tile": list(candidate), "in_table": candidate == chosen, **row}


def time_kernel(shape: Shape, kernel: str, tensors: dict[str, Tensor]) -> float:
    wanted = {"forward": (), "query_gradient": ("q",), "key_value_gradient": ("k", "v")}[kernel]
    given = {name: value if name in wanted else value.detach() for name, value in tensors.items()}
    function = native(shape, tensors["q"].device)
    if not wanted:
        return milliseconds(lambda: function(**given), tensors["q"].device)
    output = function(**given)
    leaves, dy = [given[name] for name in wanted], torch.ones_like(output)
    return milliseconds(lambda: torch.autograd.grad(output, leaves, dy, retain_graph=True), dy.device.type, warmup=25, rep=100)


# ---------------------------------------------------------------------------------------------------------------------
# Report

HEADER = [
    "shape", "provider", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "both ms", "largest error",
]  # fmt: skip


def markdown(report: dict) -> str:
    rows = [row for row in report["rows"] if "error" not in row]
    failed = [row for row in report["rows"] if "error" in row]
    if report["options"]["sweep"]:
        # the fastest eight of each kernel and what the table has
        lines = [markdown_table(["shape", "kernel", "queries, keys, warps, stages", "ms"], sweep_cells(rows))]
        failed = failed[:3]
    else:
        lines = [
            "bf16. TFLOP/s count the pairs of a query and a key that it sees: 4·head_dim operations forwards, 10 backwards. "
            "Errors of the first sequence and key-value head, against float64.",
            "",
            markdown_table(HEADER, [cells(row) for row in rows]),
        ]
    reasons = [f"- no figures for {row['shape']}, {row.get('provider') or row['tile']}: {row['error']}" for row in failed]
    return "\n".join([*lines, "", *reasons, "", describe(report["environment"])])


def cells(row: dict) -> list[str]:
    worst = max(row["errors"], key=lambda name: row["errors"][name] if row["errors"][name] == row["errors"][name] else 1e30)
    numbers = [f"{row[key]:.4g}" for key in ("forward_ms", "forward_tflops", "backward_ms", "backward_tflops", "total_ms")]
    return [row["shape"], row["provider"], *numbers, f"{row['errors'][worst]:.1e} {worst}"]


def sweep_cells(rows: list[dict]) -> list[list[str]]:
    result = []
    for (shape, kernel), group in itertools.groupby(rows, lambda row: (row["shape"], row["kernel"])):
        ranked = sorted(group, key=lambda row: row["ms"])
        for row in [*ranked[:8], *(row for row in ranked[8:] if row["in_table"])]:
            tile = ", ".join(map(str, row["tile"])) + (" (in the table)" if row["in_table"] else "")
            result.append([shape, kernel, tile, f"{row['ms']:.4g}"])
    return result


if __name__ == "__main__":
    main()
