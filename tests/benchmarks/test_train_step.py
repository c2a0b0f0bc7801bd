"""The benchmark of training steps, run as a user runs it, on tiny models on CPU; and its parts that a CPU run does not show."""

import argparse
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "train_step.py"
TINY = {  # shape: family
    "tiny": "llama",
    "tiny-qwen3": "qwen3",
    "tiny-gemma2": "gemma2",
    "tiny-gpt-oss": "gpt_oss",
    "tiny-qwen3-moe": "qwen3_moe",
    "tiny-internvl": "internvl",
}


@pytest.fixture(scope="module")
def train_step():
    """The script as a module, with its folder importable as when it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield import_module("train_step")


def run(output: Path, *arguments: str, shape: str = "tiny", path: Path | None = None) -> dict:
    """The script's report. `path` comes first among the folders in which it finds packages."""
    folders = [str(folder) for folder in (path, ROOT) if folder is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(SCRIPT), "--shape", shape, "--device", "cpu", "--batch", "2", "--length", "16"]
    command += ["--steps", "2", "--warmup", "2", "--output", str(output), *arguments]
    subprocess.run(command, env=environment, check=True, cwd=ROOT)
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict:
    """One run of stock, of a Liger-Kernel that breaks at import, and of the native classes."""
    folder = tmp_path_factory.mktemp("train_step")
    broken = folder / "packages" / "liger_kernel"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    arguments = ("--implementations", "stock,liger-kernel,native", "--dtype", "fp32", "--commit", "0123abc")
    profile = folder / "profile.md"
    report = run(folder / "results.json", *arguments, "--profile", str(profile), path=broken.parent)
    return {"json": report, "markdown": (folder / "results.md").read_text(), "profile": profile.read_text()}


def row(reports: dict, implementation: str) -> dict:
    return next(row for row in reports["json"]["rows"] if row["implementation"] == implementation)


def test_a_failing_implementation_is_a_row_with_its_error(reports):
    assert [row["implementation"] for row in reports["json"]["rows"]] == ["stock", "liger-kernel", "native"]
    assert row(reports, "liger-kernel")["error"] == "ImportError: broken on purpose"
    assert "liger-kernel failed: ImportError: broken on purpose" in reports["markdown"]
    assert "step_ms" not in row(reports, "liger-kernel")


def test_what_is_measured(reports):
    stock = row(reports, "stock")
    assert len(stock["all_step_ms"]) == 2 and len(stock["losses"]) == 4
    assert min(stock["all_step_ms"]) <= stock["step_ms"] <= max(stock["all_step_ms"])
    assert stock["tokens_per_second"] == pytest.approx(2 * 16 / stock["step_ms"] * 1000)
    assert stock["peak_gib"] is None and stock["reserved_gib"] is None  # there is no device memory to measure
    # per layer 64·(64+2·32) + 64·64 + 3·64·160 weights, 2 layers, 64·320 for the head, 6 operations each; causal attention
    weights = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 160) + 64 * 320
    assert reports["json"]["model_flops_per_step"] == 2 * (6 * weights * 16 + 3 * 2 * 2 * 16**2 * 64)
    assert stock["parameters"] == weights + 64 * 320 + 5 * 64


def test_the_environment_is_recorded(reports):
    environment = reports["json"]["environment"]
    assert environment["commit"] == "0123abc"
    assert environment["torch"] and environment["transformers"] and environment["date"]


def test_the_optimizer_trains(reports):
    losses = row(reports, "stock")["losses"]
    assert losses[-1] < losses[0]  # the same batch in every step


def test_native_starts_from_the_stock_weights_and_takes_the_same_steps(reports):
    stock, native = row(reports, "stock"), row(reports, "native")
    assert "error" not in native, native["error"]
    assert native["parameters"] == stock["parameters"]
    # fp32: losses near 6 are sums of some 1e3 rounded terms; four AdamW steps at 1e-5 differ by signs of tiny gradients
    assert native["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert native["loss_difference"] == native["losses"][0] - stock["losses"][0]
    assert native["time_over_stock"] == native["step_ms"] / stock["step_ms"]
    assert native["time_over_liger_kernel"] is None  # it failed, so there is no such ratio


def test_the_profile_names_what_ran(reports):
    assert "# stock" in reports["profile"] and "aten::mm" in reports["profile"]


def test_weights_do_not_depend_on_the_process_and_do_on_the_seed(reports, tmp_path):
    arguments = ("--implementations", "stock,stock", "--optimizer", "none", "--dtype", "fp32", "--seed", "1")
    first, second = (row["losses"] for row in run(tmp_path / "results.json", *arguments)["rows"])
    assert first == second
    assert first[0] == first[-1]  # no optimizer: the weights stay
    assert first[0] != row(reports, "stock")["losses"][0]


def test_an_unknown_implementation_is_refused():
    command = [sys.executable, str(SCRIPT), "--implementations", "stock+fast"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "'stock+fast' is none of stock, liger-kernel, native" in answer.stderr
    assert "flex_attention" in answer.stderr


def test_suffixes(train_step):
    texts = train_step.implementations_of("stock, native+compile, liger-kernel@eager,native+compile@flex_attention")
    assert [tuple(train_step.parts_of(text)) for text in texts] == [
        ("stock", False, None),
        ("native", True, None),
        ("liger-kernel", False, "eager"),
        ("native", True, "flex_attention"),
    ]


@pytest.mark.parametrize("text", ["", "native@", "native+", "native@fast", "native@eager+compile", "+compile", "stock,,native"])
def test_wrong_suffixes_are_refused(train_step, text):
    with pytest.raises(argparse.ArgumentTypeError, match="is none of stock, liger-kernel, native"):
        train_step.implementations_of(text)


@pytest.mark.parametrize("shape", ["tiny-qwen3", "tiny-gemma2", "tiny-gpt-oss", "tiny-qwen3-moe", "tiny-internvl"])
def test_native_takes_the_steps_of_stock_in_other_families(shape, tmp_path):
    """In rows with an attention of their own: sdpa, the default, cannot run Gemma 2, and says so in its row."""
    arguments = ("--dtype", "fp32", "--images", "2", "--layers", "3")  # three layers, so that both kinds of Gemma 2's are there
    names = "stock@eager,native@eager" + (",stock" if shape == "tiny-gemma2" else "")
    stock, native, *default = run(tmp_path / "results.json", "--implementations", names, *arguments, shape=shape)["rows"]
    assert "error" not in native, native["error"]
    assert native["parameters"] == stock["parameters"]
    # fp32: losses near 6 are sums of some 1e3 rounded terms; four AdamW steps at 1e-5 differ by signs of tiny gradients
    assert native["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert stock["losses"][-1] < stock["losses"][0]
    assert native["time_over_stock"] == native["step_ms"] / stock["step_ms"]
    for row in default:
        assert row["error"] == "ValueError: sdpa cannot cap the attention scores of gemma2: name @eager or @flex_attention"


@pytest.mark.parametrize(
    "shape, center", [("tiny", 1.0), ("tiny-qwen3", 1.0), ("tiny-gemma2", 0.0), ("tiny-gpt-oss", 1.0), ("tiny-qwen3-moe", 1.0)]
)
def test_weights_fit_the_stock_model_and_norms_lie_around_their_initial_value(train_step, shape, center):
    config = train_step.config_of(shape, None)
    assert config.model_type == TINY[shape]
    weights = train_step.stock_weights(config, torch.float32, "cpu", seed=0)
    AutoModelForCausalLM.from_config(config).load_state_dict(weights)
    norms = torch.cat([weight for name, weight in weights.items() if "norm" in name])
    # 0.1·randn: the mean of n values is off by 0.1/√n, here five times that at most
    assert norms.mean().item() == pytest.approx(center, abs=0.5 / len(norms) ** 0.5)
    assert norms.std().item() == pytest.approx(0.1, rel=0.2)


def test_layers_shorten_the_kinds_of_layers_too(train_step):
    config = train_step.config_of("gemma2-9b", 3)
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert train_step.config_of("qwen3-8b", 5).layer_types == ["full_attention"] * 5


@pytest.mark.parametrize("length, pairs", [(16, 96), (8, 32), (4, 8)])
def test_operations_of_a_sliding_window(train_step, length, pairs):
    """tiny-gemma2: layer 0 slides by 8, layer 1 is full; 4 heads of 16, 2 key-value heads, a tied head of 320.

    Pairs of query and key: full length²/2; sliding the same up to length 8, and at 16 the 32 of the first 8 queries and 8 of
    each other. A pair and head costs 2 products of 16, 2 operations each, forwards, and twice that backwards.
    """
    weights = 2 * (64 * 64 + 64 * 2 * 2 * 16 + 64 * 64 + 3 * 64 * 160) + 64 * 320
    attention = 3 * 4 * (4 * 16) * (pairs + length**2 // 2)
    config = train_step.config_of("tiny-gemma2", None)
    assert train_step.step_flops(config, batch=2, length=length) == 2 * (6 * weights * length + attention)


def test_operations_of_experts(train_step):
    """tiny-qwen3-moe: of 4 experts of width 32 a token goes to 2; a router of 4 rows."""
    layer = 64 * 64 + 64 * 2 * 2 * 16 + 64 * 64 + 2 * 3 * 64 * 32 + 64 * 4
    attention = 2 * 3 * 4 * (4 * 16) * 16**2 // 2
    config = train_step.config_of("tiny-qwen3-moe", None)
    assert train_step.step_flops(config, batch=1, length=16) == 6 * (2 * layer + 64 * 320) * 16 + attention


def test_a_step_in_backward_is_the_same_step(tmp_path):
    arguments = ("--dtype", "fp32", "--implementations", "native")
    rows = [
        run(tmp_path / f"{name}.json", *arguments, "--optimizer", name, shape="tiny-gpt-oss")["rows"][0]
        for name in ("sgd", "sgd-in-backward")
    ]
    assert rows[0]["losses"] == rows[1]["losses"] and rows[0]["losses"][0] != rows[0]["losses"][-1]


def test_ratios_are_to_the_best_row_of_a_name(train_step):
    def measured(implementation, step_ms, peak_gib):
        return {"implementation": implementation, "step_ms": step_ms, "peak_gib": peak_gib, "losses": [6.0, 5.0]}

    rows = [
        measured("stock@eager", 800.0, 90.0),
        measured("liger-kernel@eager", 600.0, 40.0),
        measured("liger-kernel+compile@flex_attention", 500.0, 50.0),
        {"implementation": "liger-kernel", "error": "OutOfMemoryError: CUDA out of memory."},
        measured("native", 400.0, 30.0),
    ]
    options = {"batch": 1, "length": 1, "device": "cuda", "dtype": "bf16"}
    train_step.compare({"options": options, "model_flops_per_step": 1, "rows": rows})
    native, eager = rows[4], rows[1]
    assert (native["time_over_stock"], native["peak_over_stock"]) == (400 / 800, 30 / 90)
    assert (native["time_over_liger_kernel"], native["peak_over_liger_kernel"]) == (400 / 500, 30 / 40)
    assert (eager["time_over_liger_kernel"], eager["peak_over_liger_kernel"]) == (600 / 500, 1.0)
    assert rows[3] == {"implementation": "liger-kernel", "error": "OutOfMemoryError: CUDA out of memory."}
