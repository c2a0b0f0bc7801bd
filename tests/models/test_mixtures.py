"""What models with routed experts have beyond others: routing, router logits, the loss that balances load, experts' adapters.

Rows O44 to O49 of the list of public reports that this project keeps. O45 is in tests/conversions/test_mxfp4.py; empty
experts, all tokens to one, one token and 65537 (O47) and the zeros of unused experts (O49) are tests of the op too.
"""

import pytest
import torch
from models.comparison import FP32, assert_equal, error, inputs_of, results, stock_gradients, stock_names
from models.families import CASES, GPT_OSS, QWEN3_MOE, Case
from transformers import GptOssConfig, Trainer, TrainingArguments
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from liger_models import ops
from liger_models.layers.moe import (
    LigerClampedExperts,
    LigerExperts,
    LigerSoftmaxTopKRouter,
    LigerTopKSoftmaxRouter,
    load_balancing_loss,
)

MIXTURES = [case for case in CASES if case.family.experts]
MAIN = [case for case in MIXTURES if case.main]
every_mixture = pytest.mark.parametrize("case", MIXTURES, ids=str)
main_mixtures = pytest.mark.parametrize("case", MAIN, ids=str)


def _padded(model) -> dict:
    inputs = inputs_of(model)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :5], mask[1, -3:] = 0, 0
    labels = inputs["labels"].masked_fill(mask == 0, -100)
    labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)  # what padding would predict
    return {"input_ids": inputs["input_ids"], "labels": labels, "attention_mask": mask}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@every_mixture
def test_auxiliary_loss_and_every_gradient(case: Case, training: bool, build):
    """O48. The weight of the auxiliary loss is 10 here, so that its part of every gradient is as large as the rest."""
    options = dict(attn_implementation="eager", router_aux_loss_coef=10.0)
    stock, native = (build(kind, case, **options).train(training) for kind in ("stock", "native"))
    names, inputs = stock_names(stock), _padded(stock)
    expected = results(stock, names, **inputs, output_router_logits=True)
    actual = results(native, names, **inputs, output_router_logits=True)
    assert_equal(actual, expected, without=("logits",) if training else (), tolerance=2 * FP32)
    for given in (inputs, {"input_ids": inputs["input_ids"]}):
        outputs = [model(**given, output_router_logits=True) for model in (native, stock)]
        assert error(*(output.aux_loss for output in outputs)) <= FP32
        assert len(outputs[0].router_logits) == len(outputs[1].router_logits) > 0
        for one, other in zip(*(output.router_logits for output in outputs)):
            assert error(one, other) <= FP32
    without = native(**inputs)
    assert without.aux_loss is None and without.router_logits is None
    assert error(actual["loss"], without.loss + 10.0 * native(**inputs, output_router_logits=True).aux_loss) <= FP32


@main_mixtures
def test_the_configuration_may_ask_for_router_logits(case: Case, build):
    """Also in the order of the stock output's fields, and of a base model."""
    found = [build(kind, case, output_router_logits=True)(**inputs_of(build("native", case))) for kind in ("native", "stock")]
    assert list(found[0].keys()) == list(found[1].keys())
    for one, other in zip(found[0].to_tuple(), found[1].to_tuple()):
        if isinstance(one, torch.Tensor):
            assert error(one, other) <= FP32
    base = build("native", case, "base", saved_as="causal_lm")
    outputs = base(inputs_of(base)["input_ids"], output_router_logits=True, output_hidden_states=True)
    assert len(outputs.router_logits) == len(found[1].router_logits)


@main_mixtures
def test_auxiliary_loss_while_a_cache_grows(case: Case, build):
    """The attention mask is longer than the tokens that went through the routers."""
    native = build("native", case)
    tokens = inputs_of(native)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    whole = native(tokens, attention_mask=mask, use_cache=True, output_router_logits=True)
    (cache_name,) = {"cache", "past_key_values"} & whole.keys()
    more = torch.cat((mask, mask.new_ones(2, 1)), dim=1)
    step = native(tokens[:, :1], attention_mask=more, **{cache_name: whole[cache_name]}, output_router_logits=True)
    top_k = native.config.num_experts_per_tok
    assert error(step.aux_loss, load_balancing_loss(step.router_logits, top_k)) <= FP32


def test_load_balancing_loss_by_hand():
    """Two experts, one choice: three of four tokens to the first. Shares 3/4 and 1/4, mean probabilities as computed here."""
    logits = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.5, 0.0], [0.0, 3.0]])
    probabilities = logits.softmax(-1).mean(0)
    expected = 2 * (0.75 * probabilities[0] + 0.25 * probabilities[1])
    assert load_balancing_loss((logits,), 1).item() == pytest.approx(expected.item(), rel=1e-6)
    padded = torch.cat((logits, torch.tensor([[9.0, -9.0], [9.0, -9.0]])))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert load_balancing_loss((padded,), 1, mask).item() == pytest.approx(expected.item(), rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Routers: bit by bit, as one flipped expert changes a token's output by its whole size


def _routers(kind: str, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    options = dict(hidden_size=96, num_experts_per_tok=4)
    if kind == "gpt_oss":
        stock = GptOssTopKRouter(GptOssConfig(**options, num_local_experts=32))
        native = LigerTopKSoftmaxRouter(96, 32, 4)
    else:
        configuration = QWEN3_MOE.stock("base").config_class(**options, num_experts=32, norm_topk_prob=kind == "normalised")
        stock = Qwen3MoeTopKRouter(configuration)
        native = LigerSoftmaxTopKRouter(96, 32, 4, normalise=kind == "normalised")
    generator = torch.Generator().manual_seed(3)
    for parameter in stock.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    native.load_state_dict(stock.state_dict())
    return stock.to(dtype), native.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["gpt_oss", "normalised", "plain"])
def test_o44_the_same_experts_and_weights_for_the_same_hidden_states(kind: str, dtype):
    """4096 tokens; in bf16 some dozens of them have equal logits at the border between the fourth and the fifth expert."""
    stock, native = _routers(kind, dtype)
    hidden = torch.randn(4096, 96, generator=torch.Generator().manual_seed(4)).to(dtype)
    for one, other in zip(native(hidden), stock(hidden)):
        assert one.dtype == other.dtype and torch.equal(one, other)
    if dtype == torch.bfloat16:
        largest = native(hidden)[0].topk(5).values
        assert (largest[:, 3] == largest[:, 4]).sum() > 20  # the test would see a difference in how ties are broken
    if kind != "plain":
        sums = native(hidden)[1].float().sum(-1)
        assert (sums - 1).abs().max() <= 4 * torch.finfo(dtype).eps


@main_mixtures
def test_o44_routing_in_a_bf16_model(case: Case, build):
    """Each layer's router, given the stock layer's input."""
    stock, native = (build(kind, case, dtype=torch.bfloat16, attn_implementation="eager") for kind in ("stock", "native"))
    seen = []
    routers = [
        [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
        for model in (stock, native)
    ]
    for router in routers[0]:
        router.register_forward_hook(lambda module, arguments, output: seen.append((arguments[0], output)))
    stock(inputs_of(stock)["input_ids"])
    assert len(seen) == len(routers[1]) > 0
    for router, (hidden, expected) in zip(routers[1], seen):
        for one, other in zip(router(hidden), expected):
            assert torch.equal(one, other)


# ---------------------------------------------------------------------------------------------------------------------
# Experts


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_o46_clamped_activation_of_a_layer(backend: str, device, resolved_anew):
    """Gate 8 and up -9 give (-7 + 1) * 7 * sigmoid(1.702 * 7) = -41.99972, and no gradient passes either."""
    experts = LigerClampedExperts(1, 1, 1, alpha=1.702, limit=7.0).to(device)
    with torch.no_grad():
        experts.gate_up_weight.copy_(torch.tensor([[[8.0], [-9.0]]]))
        experts.gate_up_bias.zero_(), experts.down_weight.fill_(1.0), experts.down_bias.zero_()
    x = torch.ones(1, 1, device=device, requires_grad=True)
    with ops.use_backend(backend):
        y = experts(x, torch.zeros(1, 1, dtype=torch.long, device=device), torch.ones(1, 1, device=device))
        assert y.item() == pytest.approx(-41.99972, abs=5e-6)
        y.backward(torch.ones_like(y))
    for gradient in (x.grad, experts.gate_up_weight.grad, experts.gate_up_bias.grad):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    assert experts.down_weight.grad.item() == pytest.approx(-41.99972, abs=5e-6)


@main_mixtures
def test_o47_one_token(case: Case, build):
    stock, native = build("stock", case, attn_implementation="eager"), build("native", case, attn_implementation="eager")
    tokens = {"input_ids": torch.tensor([[7]])}
    assert_equal(results(native, **tokens), results(stock, **tokens))


@main_mixtures
def test_o49_unused_experts_have_gradients_of_zero(case: Case, build):
    """FSDP and DDP wait for every parameter's gradient."""
    native = build("native", case).train()
    tokens = torch.full((1, 3), 7)  # one token three times: at most top_k experts of the first layer
    native(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in native.named_parameters():
        assert parameter.grad is not None, name
    experts = next(module for module in native.modules() if isinstance(module, (LigerExperts, LigerClampedExperts)))
    for name, parameter in experts.named_parameters():
        used = parameter.grad.flatten(1).any(dim=1)
        assert 0 < used.sum() < len(used), name


def test_an_activation_that_the_experts_have_not_is_refused():
    configuration = next(case for case in MAIN if case.family is QWEN3_MOE).configuration()
    configuration.hidden_act = "gelu"
    with pytest.raises(NotImplementedError, match="hidden_act='gelu': the experts' op has 'silu' only"):
        QWEN3_MOE.native("causal_lm")(configuration)


def test_missing_experts_are_named(build, checkpoint, tmp_path):
    """In a state dict of the checkpoint's keys, and where the key of a stacked weight is missing altogether."""
    case = next(case for case in MAIN if case.family is QWEN3_MOE)
    native = build("native", case)
    before = native.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    width = case.options["moe_intermediate_size"]
    key = "model.layers.0.mlp.experts.3.up_proj.weight"
    result = native.load_state_dict({key: torch.ones(width, 32)}, strict=False)
    assert "model.layers.0.mlp.experts.2.up_proj.weight" in result.missing_keys and key not in result.missing_keys
    after = native.model.layers[0].mlp.experts.gate_up_proj
    before[3, width:] = 1.0
    assert torch.equal(after, before)
    with pytest.raises(RuntimeError, match=rf"size mismatch for {key}: \(2, 32\) in the state dict, \({width}, 32\)"):
        native.load_state_dict({key: torch.ones(2, 32)}, strict=False)


# ---------------------------------------------------------------------------------------------------------------------
# Training


@pytest.mark.parametrize("output_router_logits", [False, True], ids=["plain", "balanced"])
@main_mixtures
def test_trainer_and_resume(case: Case, output_router_logits: bool, build, tmp_path):
    """The losses of six steps equal stock's, and so they do when the last three start from the checkpoint of the third."""
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 90, (12, 9)).tolist()]

    def losses(kind: str, resumed: bool) -> list[float]:
        folder = tmp_path / kind
        model = build(kind, case, attn_implementation="eager", output_router_logits=output_router_logits)
        options = TrainingArguments(
            folder,
            max_steps=6,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_steps=3,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, options, train_dataset=rows)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resumed else None)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    native, stock = losses("native", False), losses("stock", False)
    assert native == pytest.approx(stock, rel=1e-5) and native[0] != native[-1]
    assert losses("native", True) == pytest.approx(native, rel=1e-6)


@main_mixtures
def test_checkpointing_keeps_the_auxiliary_loss(case: Case, build):
    native = build("native", case).train()
    names, inputs = stock_names(build("stock", case)), inputs_of(native)
    plain = results(native, names, **inputs, output_router_logits=True)
    native.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_equal(results(native, names, **inputs, output_router_logits=True), plain, tolerance=FP32)


@main_mixtures
def test_adapters_of_experts(case: Case, build):
    """PEFT's target_parameters on the native names: trained, with the experts themselves frozen, and merged."""
    peft = pytest.importorskip("peft")
    native = build("native", case)
    targets = ["mlp.experts.gate_up_weight"] if case.family is GPT_OSS else ["mlp.experts.gate_up_proj"]
    plain = native(**inputs_of(native)).logits
    model = peft.get_peft_model(native, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    adapted = model(**inputs_of(native))
    adapted.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert any("experts" in name for name in gradients)
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())
    assert error(adapted.logits, plain) > 1e-2
    merged = model.merge_and_unload()
    assert error(merged(**inputs_of(merged)).logits, adapted.logits) <= 4 * FP32


@main_mixtures
def test_half_frozen(case: Case, build):
    """Only the routers are trained: the same gradients as in stock, and none elsewhere."""
    stock, native = (build(kind, case, attn_implementation="eager").train() for kind in ("stock", "native"))
    found = []
    for model in (native, stock):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp.gate." in name or "mlp.router." in name)
        model(**inputs_of(model)).loss.backward()
        names = [name for name in stock_names(stock) if "mlp.gate." in name or "mlp.router." in name]
        found.append(stock_gradients(model, names))
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert_equal(*found)
