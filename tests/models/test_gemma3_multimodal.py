"""Gemma 3 with images, against the stock class of the same weights."""

import re

import pytest
import torch
from models.comparison import (
    FP32,
    assert_as_exact,
    assert_equal,
    cache_name,
    error,
    stock_names,
    tower_gradients,
)
from models.comparison import results_with_tower as compared
from models.families import randomise
from tiny_llama import assert_same_tensors, export, read_tensors, write_tensors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Model,
    Trainer,
    TrainingArguments,
)

import liger_models
from liger_models import LigerGemma3ForConditionalGeneration, LigerGemma3MultimodalModel
from liger_models.pretrained import CheckpointError

IMAGE, TOKENS = 99, 4  # the image token, and how many of them an image has
# Where the images of each sample begin. Windows of 5 are shorter than the sequence, and cut through the images.
IMAGES = {"two, one": ((2, 9), (5,)), "three, none": ((1, 6, 11), ()), "one": ((3,),), "none": ((), ())}
LENGTH = 16
both_modes = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
every_placement = pytest.mark.parametrize("places", IMAGES.values(), ids=IMAGES)


def configuration(image_token: int = IMAGE, head: bool = False, **text) -> Gemma3Config:
    text = dict(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        sliding_window=5,
        sliding_window_pattern=2,
        query_pre_attn_scalar=7,
        max_position_embeddings=64,
        eos_token_id=None,
        **text,
    )
    vision = dict(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=8,
        patch_size=2,
        vision_use_head=head,
    )
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=TOKENS,
        image_token_index=image_token,
        boi_token_index=97,
        eoi_token_index=98,
        eos_token_id=None,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder_of(**options):
        key = repr(options)
        if key not in made:
            model = Gemma3ForConditionalGeneration(configuration(**options))
            randomise(model)
            made[key] = tmp_path_factory.mktemp("gemma3")
            model.save_pretrained(made[key])
        return made[key]

    return folder_of


@pytest.fixture
def models(folders):
    def load(training: bool = False, made=(), **options):
        source = folders(**dict(made))
        classes = (Gemma3ForConditionalGeneration, LigerGemma3ForConditionalGeneration)
        return [cls.from_pretrained(source, **options).train(training) for cls in classes]

    return load


def inputs_of(places, image_token: int = IMAGE, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 90, (len(places), LENGTH), generator=generator)
    for row, begins in enumerate(places):
        for begin in begins:
            tokens[row, begin : begin + TOKENS] = image_token
    count = sum(len(begins) for begins in places)
    inputs = {"input_ids": tokens, "token_type_ids": (tokens == image_token).long()}
    if count:
        inputs["pixel_values"] = torch.randn(count, 3, 8, 8, generator=generator)
    return {**inputs, "labels": tokens.masked_fill(tokens == image_token, -100)}


@both_modes
@every_placement
def test_logits_loss_and_every_gradient(places, training: bool, models):
    stock, native = models(training)
    names, inputs = stock_names(stock), inputs_of(places)
    expected = compared(stock, names, **inputs, output_hidden_states=True)
    assert not places[0] or "gradient of model.vision_tower.embeddings.patch_embedding.weight" in expected
    actual = compared(native, names, **inputs, output_hidden_states=True)
    assert_equal(actual, expected, without=("logits",) if training else ())


@pytest.mark.parametrize("attention", ["eager", "sdpa", "liger"])
def test_attention_functions(attention: str, models, folders):
    stock, _ = models(attn_implementation="eager" if attention == "liger" else attention)
    native = LigerGemma3ForConditionalGeneration.from_pretrained(folders(), attn_implementation=attention)
    names, inputs = stock_names(stock), inputs_of(IMAGES["two, one"])
    assert_equal(compared(native.eval(), names, **inputs), compared(stock, names, **inputs))


@both_modes
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_left_padding(attention: str, training: bool, models):
    stock, native = models(training, attn_implementation=attention)
    names, inputs = stock_names(stock), inputs_of(IMAGES["two, one"])
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :4] = 0
    inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    inputs["attention_mask"] = mask
    assert_equal(
        compared(native, names, **inputs),
        compared(stock, names, **inputs),
        without=("logits",) if training else (),
    )


def test_without_token_types_images_are_causal(models):
    stock, native = models()
    inputs = inputs_of(IMAGES["one"])
    both_ways = stock(**inputs).logits
    inputs.pop("token_type_ids")
    expected = stock(**inputs).logits
    assert error(both_ways, expected) > 1e-3
    assert error(native(**inputs).logits, expected) <= FP32


def test_image_features(models):
    stock, native = models()
    pixels = inputs_of(IMAGES["two, one"])["pixel_values"]
    expected, actual = (model.get_image_features(pixels) for model in (stock, native))
    assert error(actual.pooler_output, expected.pooler_output) <= FP32
    assert error(actual.last_hidden_state, expected.last_hidden_state) <= FP32
    inputs = inputs_of(IMAGES["two, one"])
    assert error(native(**inputs).image_hidden_states, expected.pooler_output) <= FP32
    given = {name: tensor for name, tensor in inputs.items() if name != "pixel_values"}
    again = native(**given, mm_encoder_outputs={"image": actual})
    assert torch.equal(again.logits, native(**inputs).logits)


@pytest.mark.parametrize("placement", ["two, one", "none"])
def test_outputs_have_the_fields_of_the_installed_stock_class(placement: str, models):
    stock, native = models()
    inputs = inputs_of(IMAGES[placement])
    assert list(native(**inputs).keys()) == list(stock(**inputs).keys())
    expected, actual = (model(**inputs, use_cache=False, return_dict=False) for model in (stock, native))
    assert [type(value) for value in actual] == [type(value) for value in expected]
    inputs.pop("labels")
    assert list(native.model(**inputs).keys()) == list(stock.model(**inputs).keys())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("typed", [True, False], ids=["token types", "no token types"])
def test_bidirectional_text_model(typed: bool, attention: str, models):
    """The stock class's masks are causal between text tokens whatever its text configuration says."""
    stock, native = models(made={"use_bidirectional_attention": True}.items(), attn_implementation=attention)
    inputs = inputs_of(IMAGES["two, one"])
    if not typed:
        inputs.pop("token_type_ids")
    assert error(native(**inputs).logits, stock(**inputs).logits) <= FP32


def test_compiles_without_a_graph_break(models):
    native = models(True)[1]
    inputs = inputs_of(IMAGES["two, one"])
    compiled = torch.compile(native, backend="eager", fullgraph=True)
    assert error(compiled(**inputs).loss, native(**inputs).loss) <= FP32


@both_modes
def test_image_token_outside_the_vocabulary(training: bool, models):
    stock, native = models(training, made={"image_token": 500}.items())
    names, inputs = stock_names(stock), inputs_of(IMAGES["two, one"], image_token=500)
    assert_equal(
        compared(native, names, **inputs),
        compared(stock, names, **inputs),
        without=("logits",) if training else (),
    )


def test_pooling_head(models, folders, tmp_path):
    """Gemma 3 does not use it, but a configuration may have it: its weights are kept."""
    stock, native = models(made={"head": True}.items())
    pixels = inputs_of(IMAGES["one"])["pixel_values"]
    expected, actual = (model.model.vision_tower(pixels) for model in (stock, native))
    assert error(actual.pooler_output, expected.pooler_output) <= FP32
    assert_same_tensors(export(native, tmp_path), read_tensors(folders(head=True)))


def test_bf16_is_as_exact_as_stock(models):
    stock, native = models(dtype=torch.bfloat16)
    exact = models(dtype=torch.bfloat16)[0].double()
    names, found = stock_names(stock), []
    for seed in range(4):
        inputs = inputs_of(IMAGES["two, one"], seed=seed)
        inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
        given = [{**inputs, "pixel_values": inputs["pixel_values"].to(model.dtype)} for model in (native, stock, exact)]
        found.append([compared(m, names, **g) for m, g in zip((native, stock, exact), given)])
    assert_as_exact(found, factor=1.5, floor=2.0**-8)


@pytest.mark.parametrize("images", [("one", "pixels"), ("two, one", "fewer"), ("one", "none")], ids=str)
def test_images_that_do_not_match_the_tokens(images, models):
    placement, kind = images
    inputs = inputs_of(IMAGES[placement])
    messages = []
    for model in models():
        given = dict(inputs)
        if kind == "pixels":
            given["pixel_values"] = torch.cat([inputs["pixel_values"]] * 2)
        elif kind == "fewer":
            given["pixel_values"] = inputs["pixel_values"][:2]
        else:
            given["input_ids"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, 5)
        with pytest.raises(ValueError) as refusal:
            model(**given)
        messages.append(str(refusal.value))
    assert "Image features and image tokens do not match" in messages[0]
    assert messages[1] == messages[0]


@pytest.mark.parametrize("frozen", ["vision_tower", "language_model"])
def test_a_frozen_tower_gets_no_gradients(frozen: str, models):
    stock, native = models(True)
    names, inputs = stock_names(stock), inputs_of(IMAGES["two, one"])
    for model in (stock, native):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name and "lm_head" not in name)
        model(**inputs).loss.backward()
    actual, expected = tower_gradients(native, names), tower_gradients(stock, names)
    assert 0 < len(expected) < len(names) and not any(frozen in name for name in expected)
    assert_equal(actual, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, models):
    stock, native = models(True)
    names, inputs = stock_names(stock), inputs_of(IMAGES["two, one"])
    stock(**inputs).loss.backward()
    native.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    native.enable_input_require_grads()
    inputs["pixel_values"] = inputs["pixel_values"].requires_grad_()  # reentrant checkpoints need a differentiable input
    native(**inputs).loss.backward()
    assert_equal(tower_gradients(native, names), tower_gradients(stock, names))


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 3}, {"prefill_chunk_size": 5}],
    ids=str,
)
@pytest.mark.parametrize("placement", ["one", "two, one"])
def test_generation(placement: str, options: dict, models):
    stock, native = models()
    inputs = inputs_of(IMAGES[placement])
    inputs.pop("labels")
    mask = torch.ones_like(inputs["input_ids"])
    if len(mask) > 1:
        mask[1, :3] = 0
    options = {**inputs, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False, **options}
    assert torch.equal(native.generate(**options), stock.generate(**options))


def test_prompt_and_one_token_with_a_cache(models):
    """O9: a step of one token after a prompt with an image equals the run without a cache."""
    stock, native = models()
    inputs = inputs_of(IMAGES["one"])
    inputs.pop("labels")
    expected = stock(**inputs).logits[:, -1]
    first = {**inputs, "input_ids": inputs["input_ids"][:, :-1], "token_type_ids": inputs["token_type_ids"][:, :-1]}
    outputs = native(**first, use_cache=True)
    name = cache_name(native)
    step = native(input_ids=inputs["input_ids"][:, -1:], **{name: outputs[name]})
    assert error(step.logits[:, -1], expected) <= FP32


def _new_layout(tensors: dict) -> dict:
    """The keys under the stock class's parameter names; what save_pretrained writes is the layout of older checkpoints."""
    renamed = {}
    for key, tensor in tensors.items():
        key = key.replace("language_model.model.", "model.language_model.", 1).replace("language_model.lm_head", "lm_head", 1)
        key = key.replace("vision_tower.vision_model.", "model.vision_tower.", 1)
        key = re.sub("^(vision_tower|multi_modal_projector)", r"model.\1", key)
        renamed[key] = tensor
    return renamed


@pytest.mark.parametrize("tied", [True, False])
def test_both_layouts_and_round_trip(tied: bool, tmp_path):
    config = configuration()
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    model = Gemma3ForConditionalGeneration(config)
    randomise(model)
    model.save_pretrained(tmp_path / "old")
    tensors = read_tensors(tmp_path / "old")
    assert any(key.endswith("lm_head.weight") for key in tensors) != tied
    renamed = _new_layout(tensors)
    assert set(renamed) == {n for n in model.state_dict() if not (tied and n == "lm_head.weight")} and set(tensors) != set(
        renamed
    )
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text((tmp_path / "old" / "config.json").read_text())
    write_tensors(tmp_path / "new", renamed)
    for layout in ("new", "old"):
        stock = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / layout)
        native = LigerGemma3ForConditionalGeneration.from_pretrained(tmp_path / layout)
        assert (native.lm_head.weight is native.get_input_embeddings().weight) == tied
        expected = export(stock, tmp_path / f"stock-{layout}")
        assert_same_tensors(export(native, tmp_path / f"native-{layout}"), expected)
        assert_same_tensors(expected, read_tensors(tmp_path / layout))
    loaded, info = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "native-old", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = inputs_of(IMAGES["one"])
    assert torch.equal(loaded.eval()(**inputs).logits, model.eval()(**inputs).logits)


@pytest.mark.parametrize("base", [False, True], ids=["with head", "base"])
def test_layout_of_the_published_checkpoints(base: bool, folders, tmp_path):
    """There the tower's keys have a prefix more than those that save_pretrained of a new model writes, and the tied head may be
    written out. The native model reads the same values and writes what the stock model writes."""
    tensors = {key.replace("vision_tower.", "vision_tower.vision_model.", 1): t for key, t in read_tensors(folders()).items()}
    assert "vision_tower.vision_model.post_layernorm.weight" in tensors
    tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"].clone()
    (tmp_path / "config.json").write_text((folders() / "config.json").read_text())
    write_tensors(tmp_path, tensors)
    classes = (Gemma3ForConditionalGeneration, LigerGemma3ForConditionalGeneration)
    if base:
        classes = (Gemma3Model, LigerGemma3MultimodalModel)
    stock, native = (cls.from_pretrained(tmp_path).eval() for cls in classes)
    expected = export(stock, tmp_path / "stock")
    assert "vision_tower.vision_model.post_layernorm.weight" in expected
    assert_same_tensors(export(native, tmp_path / "native"), expected)
    own = classes[1].from_pretrained(folders()).state_dict()
    assert_same_tensors(native.state_dict(), own)


def test_base_model(folders, tmp_path):
    stock, native = (cls.from_pretrained(folders()).eval() for cls in (Gemma3Model, LigerGemma3MultimodalModel))
    inputs = inputs_of(IMAGES["two, one"])
    assert error(native(**inputs).last_hidden_state, stock(**inputs).last_hidden_state) <= FP32
    assert_same_tensors(export(native, tmp_path / "native"), export(stock, tmp_path / "stock"))
    again = LigerGemma3ForConditionalGeneration.from_pretrained(tmp_path / "native")  # tied, so nothing is missing
    assert_same_tensors(export(again, tmp_path / "again"), read_tensors(folders()))


@pytest.mark.parametrize("part", ["vision_tower", "multi_modal_projector", "language_model"])
def test_missing_and_extra_keys_are_named(part: str, folders, tmp_path):
    tensors = read_tensors(folders())
    (tmp_path / "config.json").write_text((folders() / "config.json").read_text())
    keys = [key for key in tensors if part in key]
    for key in (keys[0], keys[-1], next((key for key in keys if "q_proj.weight" in key), keys[0])):
        write_tensors(tmp_path, {name: tensor for name, tensor in tensors.items() if name != key})
        with pytest.raises(CheckpointError, match="missing key") as refusal:
            LigerGemma3ForConditionalGeneration.from_pretrained(tmp_path)
        assert ".".join(key.split(".")[-2:]) in str(refusal.value)
    write_tensors(tmp_path, {**tensors, f"{keys[0].split(part)[0]}{part}.extra.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=rf"unexpected key .*{part}\.extra\.weight"):
        LigerGemma3ForConditionalGeneration.from_pretrained(tmp_path)


def test_text_and_multimodal_checkpoints_are_not_mixed_up(folders, tmp_path):
    with pytest.raises(CheckpointError, match="use the class of that family"):
        liger_models.LigerGemma3ForCausalLM.from_pretrained(folders())
    liger_models.LigerGemma3ForCausalLM(configuration().text_config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="use the class of that family"):
        LigerGemma3ForConditionalGeneration.from_pretrained(tmp_path)


@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModelForImageTextToText])
def test_auto_classes(auto_class, folders):
    with liger_models.register_auto_models():
        assert type(auto_class.from_pretrained(folders())) is LigerGemma3ForConditionalGeneration
    assert type(auto_class.from_pretrained(folders())) is Gemma3ForConditionalGeneration
    native = liger_models.LigerAutoModelForCausalLM.from_pretrained(folders())
    assert type(native) is LigerGemma3ForConditionalGeneration


def test_a_new_model_has_the_stock_distribution():
    stock, native = (
        cls(configuration(head=True)) for cls in (Gemma3ForConditionalGeneration, LigerGemma3ForConditionalGeneration)
    )
    assert native.num_parameters() == stock.num_parameters()
    for name, parameter in stock.named_parameters():
        module, _, kind = name.rpartition(".")
        own = getattr(native.get_submodule(module), kind)
        if parameter.std() > 1e-4:
            # The standard error of a standard deviation over n samples is 1/√(2n) of it; six of them, for both.
            allowed = 6 * parameter.numel() ** -0.5 + 0.05
            assert abs(own.std().item() / parameter.std().item() - 1) < allowed, name
        else:
            torch.testing.assert_close(own.mean(), parameter.mean(), rtol=0, atol=1e-5, msg=name)


def test_trainer_gives_the_stock_losses(models, tmp_path):
    """Of gradient accumulation over batches with unequal numbers of labels: the Trainer sends num_items_in_batch to both."""
    losses, accepted = [], []
    rows = []
    for seed, placement in enumerate(((2, 9), (5,), (3,), (1, 11))):
        inputs = inputs_of((placement,), seed=seed)
        inputs["labels"][:, : 4 * seed] = -100
        rows.append({name: tensor if name == "pixel_values" else tensor[0] for name, tensor in inputs.items()})

    def collate(batch):
        stacked = {name: torch.stack([row[name] for row in batch]) for name in batch[0] if name != "pixel_values"}
        return {**stacked, "pixel_values": torch.cat([row["pixel_values"] for row in batch])}

    for model in models(True):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            optim="sgd",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collate)
        trainer.train()
        accepted.append(trainer.model_accepts_loss_kwargs)
        losses.append(torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
    assert accepted[1] == accepted[0]
    assert len(losses[0]) == 3 and losses[0].unique().numel() == 3
    # The log may round to four digits, a unit of 1e-4.
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1.5e-4)


def test_processor_keys_pass_through(models):
    """O5: keys that the model does not know go unfiltered to where transformers ignores them."""
    stock, native = models()
    inputs = inputs_of(IMAGES["one"])
    assert torch.equal(native(**inputs, num_crops=torch.zeros(1)).logits, native(**inputs).logits)
    assert error(native(**inputs).loss, stock(**inputs).loss) <= FP32
