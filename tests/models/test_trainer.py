"""transformers.Trainer on the native Llama: stock's losses, evaluation, resume and checkpoints."""

import copy
import logging
import sys
import types

import pytest
import torch
import transformers
from tiny_llama import TOLERANCE, assert_close, assert_same_tensors, export, native_class, read_tensors, save_stock, stock_class
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.llama import modeling_llama

# Differences of single steps add up over at most eight of them.
STEPS_TOLERANCE = 8 * TOLERANCE


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_stock(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory):
    return save_stock(tmp_path_factory.mktemp("trained_tied"), tie_word_embeddings=True)


def rows(count: int, seed: int = 0) -> list[dict]:
    """Texts of 4 to 12 tokens, a third of whose labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        length = int(torch.randint(4, 13, (), generator=generator))
        ids = torch.randint(3, 61, (length,), generator=generator)
        ignored = torch.rand(length, generator=generator) < 1 / 3
        result.append({"input_ids": ids, "labels": torch.where(ignored, -100, ids)})
    return result


def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row["input_ids"] for row in batch], batch_first=True, padding_value=0)
    labels = pad([row["labels"] for row in batch], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


class Recording(Trainer):
    """Keeps the loss of every micro-batch, unrounded, and what came with it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses, self.items = [], []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        result = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        self.losses.append((result[0] if return_outputs else result).detach().clone())
        self.items.append(num_items_in_batch)
        return result


def trainer(model, folder, **options) -> Recording:
    """A trainer on CPU: 4 rows a batch, plain SGD so that weights are comparable, a constant rate of 0.1."""
    extra = {name: options.pop(name) for name in ("compute_metrics", "callbacks", "train_dataset") if name in options}
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "seed": 3,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    extra = {"train_dataset": rows(24), "eval_dataset": rows(10, seed=1), **extra}
    return Recording(model=model, args=TrainingArguments(**{**arguments, **options}), data_collator=collate, **extra)


def run_both(checkpoint, folder, **options) -> dict[str, Recording]:
    runs = {}
    for name, choose in (("stock", stock_class), ("native", native_class)):
        runs[name] = trainer(choose("causal").from_pretrained(checkpoint), folder / name, **options)
        runs[name].train()
    return runs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"max_grad_norm": 0.01},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05, "per_device_train_batch_size": 2},
        {"gradient_checkpointing": True},
        {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
        {"weight_decay": 0.1},
        {"label_smoothing_factor": 0.1},
        {"train_sampling_strategy": "group_by_length"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_training_equals_stock(tmp_path, checkpoint, options):
    runs = run_both(checkpoint, tmp_path, **options)
    stock, native = runs["stock"], runs["native"]
    assert len(native.losses) == len(stock.losses) > 0
    for step, (actual, expected) in enumerate(zip(native.losses, stock.losses)):
        assert_close(actual, expected, STEPS_TOLERANCE, f"loss {step}")
    assert [int(n) for n in native.items] == [int(n) for n in stock.items], "num_items_in_batch"
    logs = [[log for log in run.state.log_history if "grad_norm" in log] for run in (stock, native)]
    for expected, actual in zip(*logs):
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-4)
    expected, actual = export(stock.model, tmp_path / "s"), export(native.model, tmp_path / "n")
    before = read_tensors(checkpoint)
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, STEPS_TOLERANCE, name)
        assert not torch.equal(tensor, before[name]), f"{name} was not trained and shows nothing"


def test_tied_training_equals_stock(tmp_path, tied_checkpoint):
    runs = run_both(tied_checkpoint, tmp_path)
    expected, actual = (export(runs[name].model, tmp_path / name / "out") for name in ("stock", "native"))
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, STEPS_TOLERANCE, name)
    assert runs["native"].model.lm_head.weight is runs["native"].model.model.embed_tokens.weight


def test_adamw_losses(tmp_path, checkpoint):
    """The optimiser divides by the gradient's size, so rounding differences grow; three small steps keep them small."""
    runs = run_both(checkpoint, tmp_path, optim="adamw_torch", learning_rate=1e-3, max_steps=3)
    for actual, expected in zip(runs["native"].losses, runs["stock"].losses):
        assert_close(actual, expected, 1e-4, "loss")


def test_evaluation_with_metrics(tmp_path, checkpoint):
    """O53: compute_metrics gets logits, those of stock."""
    seen = {}

    def metrics_into(name):
        def compute(prediction):
            seen[name] = prediction
            predicted, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
            return {"accuracy": float((predicted == labels)[labels != -100].mean())}

        return compute

    results = {}
    for name, choose in (("stock", stock_class), ("native", native_class)):
        model = choose("causal").from_pretrained(checkpoint)
        results[name] = trainer(model, tmp_path / name, compute_metrics=metrics_into(name)).evaluate()
    assert seen["native"].predictions.shape == (*seen["stock"].label_ids.shape, 61)
    counted = seen["stock"].label_ids != -100
    assert_close(torch.from_numpy(seen["native"].predictions[counted]), torch.from_numpy(seen["stock"].predictions[counted]))
    assert results["native"]["eval_loss"] == pytest.approx(results["stock"]["eval_loss"], rel=TOLERANCE)
    assert results["native"]["eval_accuracy"] == results["stock"]["eval_accuracy"]


@pytest.mark.parametrize("liger", [False, True])
def test_evaluation_of_the_loss_only(tmp_path, checkpoint, liger):
    """prediction_loss_only, with which use_liger_kernel adds skip_logits=True to the inputs."""
    results = []
    for choose in (stock_class, native_class):
        options = {"prediction_loss_only": True, "use_liger_kernel": liger and choose is native_class}
        results.append(trainer(choose("causal").from_pretrained(checkpoint), tmp_path, **options).evaluate())
    assert results[1]["eval_loss"] == pytest.approx(results[0]["eval_loss"], rel=TOLERANCE)


def test_predictions(tmp_path, checkpoint):
    outputs = [
        trainer(choose("causal").from_pretrained(checkpoint), tmp_path).predict(rows(3, seed=2))
        for choose in (stock_class, native_class)
    ]
    counted = outputs[0].label_ids != -100
    assert_close(*(torch.from_numpy(output.predictions[counted]) for output in reversed(outputs)))


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_resume_equals_an_uninterrupted_run(tmp_path, checkpoint, optim):
    """Trap 2: the Trainer restores a checkpoint by load_state_dict(stock keys, strict=False)."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "optim": optim, "learning_rate": 0.01}
    whole = trainer(native_class("causal").from_pretrained(checkpoint), tmp_path / "run", **options)
    whole.train()
    other = save_stock(tmp_path / "other", seed=8)  # nothing of these weights may survive
    resumed = trainer(native_class("causal").from_pretrained(other), tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert len(resumed.losses) == 3
    assert torch.equal(torch.stack(resumed.losses), torch.stack(whole.losses[3:]))
    assert_same_tensors(export(resumed.model, tmp_path / "b"), export(whole.model, tmp_path / "a"))


def test_stock_run_continues_on_native(tmp_path, checkpoint):
    """Weights and position of a run move between the classes, both ways; optimiser states have other parameters."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    runs = run_both(checkpoint, tmp_path, **options)
    for saved, choose in (("stock", native_class), ("native", stock_class)):
        run = trainer(choose("causal").from_pretrained(checkpoint), tmp_path / f"from {saved}", **options)
        (tmp_path / saved / "checkpoint-2" / "optimizer.pt").unlink()
        run.train(resume_from_checkpoint=str(tmp_path / saved / "checkpoint-2"))
        for actual, expected in zip(run.losses, runs["stock"].losses[2:], strict=True):
            assert_close(actual, expected, STEPS_TOLERANCE, "loss")


def test_checkpoints_are_stock_checkpoints(tmp_path, checkpoint):
    run = trainer(native_class("causal").from_pretrained(checkpoint), tmp_path, save_strategy="steps", save_steps=4)
    run.train()
    model, info = stock_class("causal").from_pretrained(tmp_path / "checkpoint-4", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_tensors(read_tensors(tmp_path / "checkpoint-4"), export(run.model, tmp_path / "out"))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert_close(run.model.eval()(ids).logits, model(ids).logits)


def test_best_model_is_loaded_at_the_end(tmp_path, checkpoint):
    """The evaluation loss is best at the first save: a rate that rises a hundredfold afterwards spoils the model."""

    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **_):
            optimizer.param_groups[0]["lr"] = 20.0

    run = trainer(
        native_class("causal").from_pretrained(checkpoint),
        tmp_path,
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=1,
        eval_steps=1,
        max_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        callbacks=[Spoil()],
    )
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-1")
    best, last = (read_tensors(tmp_path / f"checkpoint-{step}") for step in (1, 3))
    final = export(run.model, tmp_path / "out")
    assert_same_tensors(final, best)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(final[name], last[name])


def test_half_precision_training_is_finite_and_close(tmp_path, checkpoint):
    """bf16 autocast over fp32 weights."""
    runs = run_both(checkpoint, tmp_path, bf16=True)
    for actual, expected in zip(runs["native"].losses, runs["stock"].losses):
        # some ten roundings a layer, averaged over the tokens of the batch
        assert_close(actual.float(), expected.float(), 8 * torch.finfo(torch.bfloat16).eps, "loss")


@pytest.fixture
def messages(caplog):
    """Everything that is logged or warned, transformers' loggers too."""
    caplog.set_level(logging.INFO)
    library = transformers.utils.logging.get_logger("transformers")
    handler = caplog.handler
    library.addHandler(handler)
    yield caplog
    library.removeHandler(handler)


@pytest.fixture
def fake_liger_kernel(monkeypatch):
    """A stand-in for the installed package, which does what such a package does: patch the module and the instance."""
    touched = []

    def apply_to_llama(model=None, **options):
        touched.append(options)
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", None)
        monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", None)
        model.forward = types.MethodType(lambda self, *_, **__: None, model)
        for layer in model.model.layers:
            layer.mlp.forward = None

    def apply_to_instance(model, **options):
        model_type = getattr(model, "config", None) and getattr(model.config, "model_type", None)
        if model_type == "llama":
            apply_to_llama(model=model, **options)

    # the package's dispatcher runs under the package's name, which is how a model can tell who asks
    transformers_module = types.ModuleType("liger_kernel.transformers")
    package = types.ModuleType("liger_kernel")
    package.transformers = transformers_module
    inside = types.FunctionType(
        apply_to_instance.__code__,
        {"__name__": "liger_kernel.transformers.monkey_patch", "__builtins__": __builtins__},
        closure=apply_to_instance.__closure__,
    )
    transformers_module._apply_liger_kernel_to_instance = lambda *args, **kwargs: inside(*args, **kwargs)
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", transformers_module)
    monkeypatch.setattr(transformers.integrations.liger, "is_liger_kernel_available", lambda: True)
    return touched


def test_the_fake_package_patches_stock(tmp_path, checkpoint, fake_liger_kernel):
    """Or the tests below would show nothing."""
    model = stock_class("causal").from_pretrained(checkpoint)
    transformers.integrations.liger.apply_liger_kernel(model, {"rope": True})
    assert fake_liger_kernel == [{"rope": True}]
    assert modeling_llama.LlamaRMSNorm is None


@pytest.mark.parametrize("options", [None, {"rope": True, "cross_entropy": True, "fused_linear_cross_entropy": False}])
@pytest.mark.parametrize("adapted", [False, True])
def test_use_liger_kernel_patches_nothing(tmp_path, checkpoint, fake_liger_kernel, messages, options, adapted):
    """Trap 6."""
    globals_before = copy.copy(vars(modeling_llama))
    plain, flagged = (native_class("causal").from_pretrained(checkpoint) for _ in range(2))
    if adapted:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=True, task_type="CAUSAL_LM")
        models = []
        for model in (plain, flagged):
            torch.manual_seed(0)
            models.append(peft.get_peft_model(model, config))
        plain, flagged = models
    expected = trainer(plain, tmp_path / "a", max_steps=2)
    expected.train()
    run = trainer(flagged, tmp_path / "b", max_steps=2, use_liger_kernel=True, liger_kernel_config=options)
    run.train()
    assert fake_liger_kernel == []
    assert vars(modeling_llama) == globals_before
    assert "forward" not in vars(flagged)
    assert torch.equal(torch.stack(run.losses), torch.stack(expected.losses))
    assert flagged.config.model_type == "llama"


def test_use_liger_kernel_warns_once(tmp_path, checkpoint, fake_liger_kernel, messages):
    transformers.utils.logging.get_logger("transformers").warning_once.cache_clear()
    model = native_class("causal").from_pretrained(checkpoint)
    for number in range(2):
        trainer(model, tmp_path / str(number), max_steps=1, use_liger_kernel=True).train()
    said = [record for record in messages.records if "native" in record.getMessage() and record.levelno >= logging.WARNING]
    assert len({record.getMessage() for record in said}) == 1
    assert "LigerLlamaForCausalLM" in said[0].getMessage()


def test_use_liger_kernel_without_the_package_says_so(tmp_path, checkpoint):
    """transformers refuses the flag if liger-kernel is not installed, for every model."""
    model = native_class("causal").from_pretrained(checkpoint)
    with pytest.raises(ImportError, match="liger-kernel"):
        trainer(model, tmp_path, max_steps=1, use_liger_kernel=True).train()


def test_packed_rows_train_as_single_rows(checkpoint):
    """Trap 8: documents packed into one row by position_ids do not see one another, whatever use_cache says."""
    documents = rows(3, seed=6)
    ids = torch.cat([row["input_ids"] for row in documents])[None]
    positions = torch.cat([torch.arange(len(row["input_ids"])) for row in documents])[None]
    labels = torch.cat([torch.cat([torch.tensor([-100]), row["labels"][1:]]) for row in documents])[None]
    stock = stock_class("causal").from_pretrained(checkpoint).train()
    total = sum(
        stock(input_ids=row["input_ids"][None], labels=row["labels"][None], num_items_in_batch=10).loss for row in documents
    )
    total.backward()
    native = native_class("causal").from_pretrained(checkpoint).train()
    loss = native(input_ids=ids, position_ids=positions, labels=labels, num_items_in_batch=10).loss
    loss.backward()
    assert_close(loss, total)
    assert_close(native.lm_head.weight.grad, stock.lm_head.weight.grad, STEPS_TOLERANCE, "gradient of the head")
    gradient = stock.model.layers[0].self_attn.q_proj.weight.grad
    assert_close(native.model.layers[0].self_attn.qkv_proj.weight.grad[:32], gradient, STEPS_TOLERANCE, "gradient of q")
