"""MXFP4: the numbers of the published format, and GPT-OSS checkpoints in it, in and out."""

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from models.comparison import error
from models.families import CASES, GPT_OSS, Case, randomise
from tiny_llama import assert_same_tensors, bits, read_tensors, write_shards, write_tensors
from transformers import AutoModelForCausalLM, Mxfp4Config

from liger_models import LigerGptOssForCausalLM, LigerLlamaForCausalLM, register_auto_models
from liger_models.conversions import mxfp4

_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP Microscaling Formats 1.0, table 8
VALUES = [*_E2M1, *(-value for value in _E2M1)]
CASE = next(case for case in CASES if case.family is GPT_OSS)


def decoded(blocks: torch.Tensor, scales: torch.Tensor) -> list[float]:
    """An independent decoder: Python floats (fp64), one number at a time, by the text of the specification."""
    numbers = []
    for block, scale in zip(blocks.reshape(-1, 16).tolist(), scales.reshape(-1).tolist()):
        for byte in block:
            for code in (byte & 0b1111, byte >> 4):
                sign = -1.0 if code & 0b1000 else 1.0
                exponent, mantissa = (code & 0b110) >> 1, code & 0b1
                # a zero exponent is subnormal: no implicit one; the exponent's bias is 1
                number = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
                numbers.append(sign * number * 2.0 ** (scale - 127))
    return numbers


def random_blocks(*shape: int, scales: range, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(scales.start, scales.stop, shape, generator=generator, dtype=torch.uint8)


def test_every_code_in_both_halves_of_a_byte():
    """O45: codes 0 to 15 with the scale 127, which is one."""
    bytes_ = torch.tensor([[low | ((15 - low) << 4) for low in range(16)]], dtype=torch.uint8)[None, None]
    found = mxfp4.dequantise(bytes_, torch.full((1, 1, 1), 127, dtype=torch.uint8), torch.float32).flatten()
    expected = torch.tensor([value for low in range(16) for value in (VALUES[low], VALUES[15 - low])])
    assert torch.equal(bits(found), bits(expected))  # -0.0 too


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_scale(dtype):
    """Scale exponents from 0 to 254, each with all codes: exact, subnormal numbers too, infinite past the largest number, never
    NaN."""
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1)
    blocks = torch.tensor([low | ((low ^ 5) << 4) for low in range(16)], dtype=torch.uint8).expand(1, 255, 1, 16)
    found = mxfp4.dequantise(blocks, scales, dtype)
    exact = torch.tensor(decoded(blocks, scales), dtype=torch.float64).view_as(found)
    representable = exact.abs() <= torch.finfo(dtype).max
    assert torch.equal(found.double()[representable], exact[representable])
    assert torch.equal(found[~representable].double(), torch.copysign(torch.tensor(torch.inf), exact[~representable]).double())
    # each code stands twice: 4 and 6 overflow at 253, and 2, 3, 4, 6 at 254, of either sign
    assert not found.isnan().any() and (~representable).sum() == 2 * 2 * (2 + 4)


def test_scale_255_is_nan():
    blocks, scales = torch.zeros(1, 1, 1, 16, dtype=torch.uint8), torch.full((1, 1, 1), 255, dtype=torch.uint8)
    assert mxfp4.dequantise(blocks, scales, torch.bfloat16).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_unchanged_weights_get_their_own_bits_back(dtype):
    """Any blocks, also such as no quantiser would write: too large a scale, zeros with a scale, numbers that overflow."""
    blocks, scales = random_blocks(3, 40, 2, scales=range(255))
    blocks[0, :5], scales[0, 7], scales[1, 7:9] = 0, 254, 253
    weight = mxfp4.dequantise(blocks, scales, dtype)
    again = mxfp4.quantise(weight, mxfp4.Origin.of(blocks, scales))
    assert torch.equal(again[0], blocks) and torch.equal(again[1], scales)


def test_a_changed_block_is_quantised_anew_and_its_neighbours_keep_their_bits():
    blocks, scales = random_blocks(2, 8, 3, scales=range(100, 140))
    weight = mxfp4.dequantise(blocks, scales, torch.bfloat16)
    weight[1, 4, 32:64] = torch.linspace(-3, 7, 32)
    again = mxfp4.quantise(weight, mxfp4.Origin.of(blocks, scales))
    changed = torch.zeros(2, 8, 3, dtype=torch.bool)
    changed[1, 4, 1] = True
    assert torch.equal(again[0][~changed], blocks[~changed]) and torch.equal(again[1][~changed], scales[~changed])
    assert again[1][changed].item() == 128  # 7 / 6 is above 1: the scale is 2
    # The gap between codes is at most 2 with the scale 1, here 4: half of it is the largest error.
    assert (mxfp4.dequantise(*again, torch.float32)[1, 4, 32:64] - weight[1, 4, 32:64].float()).abs().max() <= 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_new_weights_get_the_nearest_numbers(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(2, 6, 96, generator=generator) * torch.logspace(-3, 3, 6)[:, None]).to(dtype)
    blocks, scales = mxfp4.quantise(weight)
    largest = weight.float().unflatten(-1, (-1, 32)).abs().amax(-1)
    scale = 2.0 ** (scales.double() - 127)
    assert ((largest <= 6 * scale) & (largest > 3 * scale)).all()  # the smallest power of two that holds all of them
    found = mxfp4.dequantise(blocks, scales, torch.float64)
    choices = torch.tensor(VALUES, dtype=torch.float64) * scale[..., None, None]
    distance = (choices - weight.double().unflatten(-1, (-1, 32))[..., None]).abs().amin(-1)
    assert torch.equal((found - weight.double()).abs(), distance.flatten(-2))


def test_ties_go_to_the_even_code():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0])
    weight = torch.cat((middles, torch.tensor([6.0]), torch.zeros(23))).view(1, 1, 32)
    found = mxfp4.dequantise(*mxfp4.quantise(weight), torch.float32)[0, 0, :8]
    assert found.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_what_is_not_finite_is_refused(value):
    weight = torch.zeros(1, 2, 64)
    weight[0, 1, 40] = value
    with pytest.raises(ValueError, match="1 of its blocks have numbers that are not finite"):
        mxfp4.quantise(weight)


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="40 numbers, which is no multiple of 32"):
        mxfp4.quantise(torch.zeros(1, 2, 40))


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints. Tiny GPT-OSS has hidden and intermediate sizes of 32: one block a row.

QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.fixture(scope="module")
def quantised(checkpoint, tmp_path_factory):
    """Folder of a bf16 checkpoint whose experts are MXFP4, with scales that no quantiser would choose."""
    folder = tmp_path_factory.mktemp("mxfp4")
    model = CASE.family.stock("causal_lm").from_pretrained(checkpoint(CASE), dtype=torch.bfloat16)
    randomise(model, seed=5)
    model.save_pretrained(folder)
    tensors = read_tensors(folder)
    for seed, key in enumerate(sorted(key for key in tensors if key.endswith(_EXPERTS))):
        experts, columns, rows = tensors.pop(key).shape
        found = random_blocks(experts, rows, columns // 32, scales=range(122, 126), seed=seed)
        tensors.update(zip((f"{key}_blocks", f"{key}_scales"), found))
    write_tensors(folder, tensors)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": QUANTIZATION}))
    return folder


def stock_values(folder) -> dict[str, torch.Tensor]:
    """The stock tensors in bf16 that a quantised checkpoint stands for, by the independent decoder."""
    tensors = read_tensors(folder)
    for key in [key.removesuffix("_blocks") for key in tensors if key.endswith("_blocks")]:
        blocks, scales = tensors.pop(f"{key}_blocks"), tensors.pop(f"{key}_scales")
        values = torch.tensor(decoded(blocks, scales), dtype=torch.float64)
        tensors[key] = values.view(*blocks.shape[:2], -1).transpose(1, 2).to(torch.bfloat16).contiguous()
    return tensors


def test_values_and_bf16_export(quantised, tmp_path):
    model = LigerGptOssForCausalLM.from_pretrained(quantised)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path)
    assert_same_tensors(read_tensors(tmp_path), stock_values(quantised))
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config and config["architectures"] == ["GptOssForCausalLM"]


def test_stock_class_with_its_own_dequantisation_agrees(quantised):
    stock = AutoModelForCausalLM.from_pretrained(
        quantised, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager", experts_implementation="eager"
    )
    native = LigerGptOssForCausalLM.from_pretrained(quantised)
    state = stock.state_dict()
    for name, module in native.named_modules():
        for own, theirs in getattr(module, "stock_names", {}).items():
            assert torch.equal(module.to_stock(own, getattr(module, own)), state[f"{name}.{theirs}"]), name
    tokens = torch.arange(3, 40).view(1, -1)
    with torch.no_grad():
        # bf16 with weights equal bit by bit: 2⁻⁸ a rounding, some twenty of them in a row
        assert error(native(tokens).logits, stock(tokens).logits) < 20 * 2.0**-8


def test_untouched_export_gives_the_same_blocks_and_scales(quantised, tmp_path):
    LigerGptOssForCausalLM.from_pretrained(quantised).save_pretrained(tmp_path, weight_format="mxfp4")
    assert_same_tensors(read_tensors(tmp_path), read_tensors(quantised))
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == QUANTIZATION


def test_export_after_training_keeps_untouched_blocks(quantised, tmp_path):
    """One expert's weight is changed: its blocks are new, all others the same."""
    model = LigerGptOssForCausalLM.from_pretrained(quantised)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_weight[2, 7] += 1.0
    model.save_pretrained(tmp_path, weight_format="mxfp4")
    key = "model.layers.1.mlp.experts.down_proj_blocks"
    found, before = read_tensors(tmp_path), read_tensors(quantised)
    assert (found[key] != before[key]).flatten(2).any(-1).nonzero().tolist() == [[2, 7]]
    del found[key], before[key]
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    found[scales][2, 7] = before[scales][2, 7]
    assert_same_tensors(found, before)


def test_a_bf16_model_is_quantised_and_read_back(checkpoint, tmp_path):
    model = LigerGptOssForCausalLM.from_pretrained(checkpoint(CASE), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "mxfp4", weight_format="mxfp4")
    again = LigerGptOssForCausalLM.from_pretrained(tmp_path / "mxfp4")
    for (name, before), after in zip(model.named_parameters(), again.parameters()):
        # a gap between codes is at most a third of the larger one's magnitude, half of that is the largest error
        assert error(after, before) < (0.17 if name.endswith("_weight") else 1e-12), name
    again.save_pretrained(tmp_path / "again", weight_format="mxfp4")
    assert_same_tensors(read_tensors(tmp_path / "again"), read_tensors(tmp_path / "mxfp4"))
    assert json.loads((tmp_path / "mxfp4" / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"


@pytest.mark.parametrize("head", ["base", "sequence_classification"])
def test_other_heads_read_it(quantised, head: str):
    native = CASE.family.native(head).from_pretrained(quantised, ignore_mismatched_sizes=True)
    whole = LigerGptOssForCausalLM.from_pretrained(quantised)
    weight = native.base_model.layers[0].mlp.experts.gate_up_weight
    assert torch.equal(weight, whole.model.layers[0].mlp.experts.gate_up_weight)


def test_ways_to_ask_for_it(quantised):
    """By the Auto class, with a configuration, with Mxfp4Config(dequantize=True), with a dtype, changes, the report."""
    expected = LigerGptOssForCausalLM.from_pretrained(quantised)
    with register_auto_models():
        auto = AutoModelForCausalLM.from_pretrained(quantised, quantization_config=Mxfp4Config(dequantize=True))
    given = LigerGptOssForCausalLM.from_pretrained(quantised, config=expected.config_class.from_pretrained(quantised))
    changed, report = LigerGptOssForCausalLM.from_pretrained(
        quantised, dtype=torch.float32, router_aux_loss_coef=0.5, attn_implementation="eager", output_loading_info=True
    )
    stored = LigerGptOssForCausalLM.from_pretrained(quantised, dtype="auto")
    assert stored.dtype == torch.bfloat16
    for model in (auto, given, changed, stored):
        assert type(model) is LigerGptOssForCausalLM
        for one, other in zip(model.parameters(), expected.parameters()):
            assert torch.equal(one.bfloat16(), other)
    assert changed.dtype == torch.float32 and changed.config.router_aux_loss_coef == 0.5
    assert changed.config._attn_implementation == "eager" and not report["missing_keys"]


def test_it_is_loaded_from_shards(quantised, tmp_path):
    """Blocks and scales of one weight in different files."""
    shutil.copytree(quantised, tmp_path, dirs_exist_ok=True)
    write_shards(tmp_path, read_tensors(quantised), 7)
    for one, other in zip(*(LigerGptOssForCausalLM.from_pretrained(f).parameters() for f in (tmp_path, quantised))):
        assert torch.equal(one, other)


@pytest.mark.parametrize("gone", ["blocks", "scales"])
def test_half_a_weight_is_refused(quantised, tmp_path, gone: str):
    key = f"model.layers.1.mlp.experts.down_proj_{gone}"
    with pytest.raises(ValueError, match=f"missing key {key}"):
        LigerGptOssForCausalLM.from_pretrained(_copied(quantised, tmp_path, without=key))


def test_both_forms_of_a_weight_are_refused(quantised, tmp_path):
    key = "model.layers.0.mlp.experts.gate_up_proj"
    more = {key: stock_values(quantised)[key]}
    with pytest.raises(ValueError, match=f"unexpected key {key}_blocks or {key}_scales: the checkpoint has {key} too"):
        LigerGptOssForCausalLM.from_pretrained(_copied(quantised, tmp_path, more))


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_wrong_shapes_are_refused(quantised, tmp_path, part: str):
    key = f"model.layers.0.mlp.experts.gate_up_proj_{part}"
    tensor = read_tensors(quantised)[key]
    with pytest.raises(ValueError, match=f"size mismatch for {key}"):
        LigerGptOssForCausalLM.from_pretrained(_copied(quantised, tmp_path, {key: tensor[:, :-2].contiguous()}))


def test_other_families_refuse_the_format(checkpoint, tmp_path):
    case = next(case for case in CASES if case.family.name == "llama")
    folder = checkpoint(case)
    model = LigerLlamaForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"weight_format='mxfp4'\): it writes 'stock'"):
        model.save_pretrained(tmp_path / "out", weight_format="mxfp4")
    assert not (tmp_path / "out").exists()
    model.save_pretrained(tmp_path / "quantised")
    path = tmp_path / "quantised" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "awq", "bits": 4}}))
    with pytest.raises(NotImplementedError, match="quantised with 'awq', which LigerLlamaForCausalLM does not read"):
        LigerLlamaForCausalLM.from_pretrained(tmp_path / "quantised")


def test_a_weight_without_an_mxfp4_form_leaves_no_output(checkpoint, tmp_path):
    model = LigerGptOssForCausalLM.from_pretrained(checkpoint(CASE))
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_weight[0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj cannot be written as MXFP4: 1 of its blocks"):
        model.save_pretrained(tmp_path / "out", weight_format="mxfp4")
    assert not (tmp_path / "out").exists() and model.weight_format == "stock"


def _copied(folder, target, tensors: dict | None = None, without: str | None = None):
    for path in folder.iterdir():
        if path.name == "config.json":
            (target / path.name).write_text(path.read_text())
    write_tensors(target, {k: v for k, v in {**read_tensors(folder), **(tensors or {})}.items() if k != without})
    return target


_PEAK = """
import resource, sys, torch
from liger_models import LigerGptOssForCausalLM
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = LigerGptOssForCausalLM.from_pretrained(sys.argv[1])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((peak - before) * 1024 / sum(p.numel() * p.element_size() for p in model.parameters()))
"""


def test_peak_host_memory(tmp_path):
    """At most 1.2 of the bf16 model while loading: one quantised weight at a time, never the whole checkpoint beside it.

    The model has 12 layers, 0.5 GB of experts. What importing took is counted before; what it gave back may be used again.
    """
    options = dict(num_hidden_layers=12, hidden_size=512, intermediate_size=512, num_local_experts=24, vocab_size=512)
    configuration = Case(GPT_OSS, "memory", {**CASE.options, **options}).configuration()
    tensors = {}
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in GPT_OSS.stock("causal_lm")(configuration).state_dict().items()}
    for name, shape in shapes.items():
        if name.endswith(_EXPERTS):
            experts, columns, rows = shape
            found = random_blocks(experts, rows, columns // 32, scales=range(120, 126))
            tensors.update(zip((f"{name}_blocks", f"{name}_scales"), found))
        else:
            tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
    configuration.architectures, configuration.dtype = ["GptOssForCausalLM"], "bfloat16"
    configuration.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": QUANTIZATION}))
    write_tensors(tmp_path, tensors)
    del tensors
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PEAK), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert 0.7 < float(run.stdout.split()[-1]) <= 1.2


@pytest.mark.gpu
def test_on_a_gpu(quantised, tmp_path, cuda):
    """Dequantised there: the same bits; and quantised again from there."""
    model = LigerGptOssForCausalLM.from_pretrained(quantised, device_map="cuda")
    for one, other in zip(model.parameters(), LigerGptOssForCausalLM.from_pretrained(quantised).parameters()):
        assert one.is_cuda and torch.equal(one.cpu(), other)
    model.save_pretrained(tmp_path, weight_format="mxfp4")
    assert_same_tensors(read_tensors(tmp_path), read_tensors(quantised))
    blocks, scales = random_blocks(2, 255, 3, scales=range(255))
    for dtype in (torch.bfloat16, torch.float32):
        found = mxfp4.dequantise(blocks.cuda(), scales.cuda(), dtype).cpu()
        assert torch.equal(bits(found), bits(mxfp4.dequantise(blocks, scales, dtype)))
