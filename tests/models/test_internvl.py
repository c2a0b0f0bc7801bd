"""InternVL against the stock class of the same weights, and its checkpoints in the stock and in the original layout."""

import json
import re

import pytest
import torch
from models.comparison import (
    FP32,
    assert_as_exact,
    assert_equal,
    cache_name,
    error,
    results_with_tower,
    stock_names,
    tower_gradients,
)
from models.families import randomise
from tiny_llama import assert_same_tensors, export, read_tensors, write_tensors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLModel,
    InternVLVisionModel,
    Trainer,
    TrainingArguments,
)

import liger_models
from liger_models import LigerInternVLForConditionalGeneration, LigerInternVLModel, ops
from liger_models.conversions.internvl_chat import read_original, translated_configuration
from liger_models.layers.vision import LigerNormedVisionAttention
from liger_models.models.internvl_vision import LigerInternVLVisionBlock, LigerInternVLVisionModel
from liger_models.pretrained import CheckpointError

IMAGE, TOKENS = 99, 4  # the image token, and how many of them a tile has
# For each sample where its images begin, and how many tiles they have.
IMAGES = {
    "two, one": (((2, 1), (9, 1)), ((5, 1),)),
    "tiles": (((1, 3),), ((2, 1), (8, 2))),
    "three, none": (((1, 1), (6, 1), (11, 1)), ()),
    "one": (((3, 1),),),
    "none": ((), ()),
}
LENGTH = 18
TEXTS = ("qwen2", "qwen3", "llama")
# What the encoders of the published models differ in: 300M parameters (InternVL 1.5 to 3.5), and 6B.
VISIONS = {
    "300M": dict(norm_type="layer_norm", attention_bias=True),
    "6B": dict(norm_type="rms_norm", use_qk_norm=True),
    "norms and biases": dict(norm_type="rms_norm", use_qk_norm=True, attention_bias=True, use_mask_token=True),
    "final norm": dict(use_mean_pooling=False, hidden_act="gelu_pytorch_tanh"),
    "no positions": dict(use_absolute_position_embeddings=False),
}
both_modes = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
CLASSES = (InternVLForConditionalGeneration, LigerInternVLForConditionalGeneration)


# Text models with routed experts, which InternVL 3.5 has too.
MIXTURES = {
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
    "gpt_oss": dict(
        num_local_experts=4, num_experts_per_tok=2, sliding_window=5, rope_parameters=dict(rope_type="default", rope_theta=1e4)
    ),
}


def configuration(text: str = "qwen2", vision: str = "300M", tied: bool = False, **options) -> InternVLConfig:
    text_options = dict(
        model_type=text,
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12 if text == "qwen3" else 8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        **MIXTURES.get(text, {}),
    )
    vision_options = dict(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=8,
        patch_size=2,
        **VISIONS[vision],
    )
    return InternVLConfig(
        text_config=text_options,
        vision_config=vision_options,
        image_token_id=IMAGE,
        image_seq_length=TOKENS,
        tie_word_embeddings=tied,
        **options,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder_of(**options):
        key = repr(sorted(options.items()))
        if key not in made:
            model = InternVLForConditionalGeneration(configuration(**options))
            randomise(model)
            made[key] = tmp_path_factory.mktemp("internvl")
            model.save_pretrained(made[key])
        return made[key]

    return folder_of


@pytest.fixture
def models(folders):
    """The stock and the native model of one checkpoint."""

    def load(training: bool = False, made: dict | None = None, classes=CLASSES, **options):
        return [cls.from_pretrained(folders(**(made or {})), **options).train(training) for cls in classes]

    return load


def inputs_of(places, seed: int = 1, size: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 90, (len(places), LENGTH), generator=generator)
    for row, images in enumerate(places):
        for begin, tiles in images:
            tokens[row, begin : begin + TOKENS * tiles] = IMAGE
    count = sum(tiles for images in places for _, tiles in images)
    inputs = {"input_ids": tokens, "labels": tokens.masked_fill(tokens == IMAGE, -100)}
    if count:
        inputs["pixel_values"] = torch.randn(count, 3, size, size, generator=generator)
    return inputs


def compare(models, training: bool = False, **inputs) -> None:
    """Everything that both models return, and every gradient."""
    stock, native = models
    names = stock_names(stock)
    expected = results_with_tower(stock, names, **inputs)
    assert_equal(results_with_tower(native, names, **inputs), expected, without=("logits",) if training else ())


@both_modes
@pytest.mark.parametrize("text", [*TEXTS, *MIXTURES])
def test_logits_loss_and_every_gradient(text: str, training: bool, models):
    inputs = inputs_of(IMAGES["tiles"])
    pair = models(training, {"text": text})
    compare(pair, training, **inputs, output_hidden_states=True)
    found = results_with_tower(pair[1], stock_names(pair[0]), **inputs)
    for name in (
        "vision_tower.embeddings.cls_token",
        "vision_tower.encoder.layer.0.lambda_1",
        "multi_modal_projector.linear_1.bias",
    ):
        assert found[f"gradient of model.{name}"].norm() > 0


@both_modes
@pytest.mark.parametrize("placement", [name for name in IMAGES if name != "tiles"])
def test_images_of_a_sample(placement: str, training: bool, models):
    """O4: with `none` the model sees text only."""
    compare(models(training, {"tied": True}), training, **inputs_of(IMAGES[placement]))


@pytest.mark.parametrize("vision", [name for name in VISIONS if name != "300M"])
def test_encoders(vision: str, models):
    compare(models(made={"vision": vision}), **inputs_of(IMAGES["tiles"]))


@pytest.mark.parametrize("made", [{"vision_feature_layer": -2}, {"downsample_ratio": 0.25}, {"downsample_ratio": 1.0}], ids=str)
def test_image_features(made: dict, models):
    stock, native = models(made={**made, "vision": "final norm"}, attn_implementation="eager")
    pixels = inputs_of(IMAGES["tiles"])["pixel_values"]
    expected, actual = (model.get_image_features(pixels) for model in (stock, native))
    assert error(actual.pooler_output, expected.pooler_output) <= FP32
    assert error(actual.last_hidden_state, expected.last_hidden_state) <= FP32
    options = {"vision_feature_layer": 1, "output_hidden_states": True, "output_attentions": True}
    expected, actual = (model.get_image_features(pixels, **options) for model in (stock, native))
    assert error(actual.pooler_output, expected.pooler_output) <= FP32
    for name in ("hidden_states", "attentions"):
        assert len(actual[name]) == len(expected[name]) > 1
        assert all(error(*pair) <= FP32 for pair in zip(actual[name], expected[name]))


def test_features_in_place_of_pixels(models):
    stock, native = models()
    inputs = inputs_of(IMAGES["tiles"])
    features = native.get_image_features(inputs["pixel_values"])
    found = native(**inputs)
    assert error(found.image_hidden_states, stock.get_image_features(inputs["pixel_values"]).pooler_output) <= FP32
    given = {name: tensor for name, tensor in inputs.items() if name != "pixel_values"}
    assert torch.equal(native(**given, mm_encoder_outputs={"image": features}).logits, found.logits)
    with pytest.raises(ValueError, match="not both"):
        native(**inputs, mm_encoder_outputs={"image": features})


@pytest.mark.parametrize("size", [(16, 16), (4, 4), (8, 12), (4, 16)], ids=str)
def test_positions_are_stretched_over_images_of_another_size(size, models):
    stock, native = (model.model.vision_tower for model in models())
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    names, found = stock_names(stock), []
    for model in (native, stock):
        hidden = model(pixels).last_hidden_state
        model.zero_grad()
        hidden.square().sum().backward()
        found.append({"hidden": hidden.detach(), "positions": model.embeddings.position_embeddings.grad.clone()})
    assert len(names) and hidden.shape[1] == 1 + size[0] * size[1] // 4
    assert_equal(*found)


def test_a_larger_tile_makes_more_tokens(models):
    stock, native = models()
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = stock.get_image_features(pixels).pooler_output
    assert expected.shape[1] == 4 * TOKENS
    assert error(native.get_image_features(pixels).pooler_output, expected) <= FP32
    with pytest.raises(ValueError, match="24 patches of an image cannot be joined in squares of 2 by 2"):
        native.get_image_features(pixels[:, :, :8, :12].contiguous())
    with pytest.raises(ValueError, match="9 patches"):
        native.get_image_features(pixels[:, :, :6, :6].contiguous())


def test_masked_patches(models):
    stock, native = (model.model.vision_tower for model in models(made={"vision": "norms and biases"}))
    generator = torch.Generator().manual_seed(0)
    pixels, masked = torch.randn(2, 3, 8, 8, generator=generator), torch.rand(2, 16, generator=generator) < 0.5
    found = []
    for model in (native, stock):
        hidden = model(pixels, bool_masked_pos=masked).last_hidden_state
        model.zero_grad()
        hidden.square().sum().backward()
        found.append({"hidden": hidden.detach(), "token": model.embeddings.mask_token.grad.clone()})
    assert_equal(*found)
    plain = models()[1].model.vision_tower
    with pytest.raises(ValueError, match="use_mask_token"):
        plain(pixels, bool_masked_pos=masked)


def test_dropout_is_where_the_stock_class_has_it(models):
    """At probability 1 everything behind it is zero: what is left shows where it is."""
    pixels = inputs_of(IMAGES["one"])["pixel_values"]
    for option in ("hidden_dropout_prob", "projection_dropout", "attention_dropout"):
        found = []
        for model in models(True, attn_implementation="eager"):
            config = model.config.vision_config
            setattr(config, option, 1.0)
            fresh = type(model.model.vision_tower)(config).train()
            fresh.load_state_dict(model.model.vision_tower.state_dict())
            found.append(fresh(pixels).last_hidden_state)
            setattr(config, option, 0.0)
        assert error(found[1], found[0]) <= FP32, option


@pytest.mark.parametrize("attention", ["eager", "sdpa", "liger"])
def test_attention_functions(attention: str, models, folders):
    stock, _ = models(attn_implementation="eager" if attention == "liger" else attention)
    native = LigerInternVLForConditionalGeneration.from_pretrained(folders(), attn_implementation=attention).eval()
    compare((stock, native), **inputs_of(IMAGES["tiles"]))


@both_modes
def test_left_padding(training: bool, models):
    inputs = inputs_of(IMAGES["two, one"])
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :4] = 0
    inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    compare(models(training), training, **inputs, attention_mask=mask)


@both_modes
def test_embeddings_in_place_of_tokens(training: bool, models):
    """Image tokens are then found by their embedding."""
    stock, native = models(training)
    inputs = inputs_of(IMAGES["tiles"])
    tokens = inputs.pop("input_ids")
    expected, actual = (model(**inputs, inputs_embeds=model.get_input_embeddings()(tokens)).loss for model in (stock, native))
    assert error(actual, expected) <= FP32
    assert error(actual, native(**inputs, input_ids=tokens).loss) <= FP32


@both_modes
@pytest.mark.parametrize("text", TEXTS)
def test_packed_documents_do_not_see_each_other(text: str, training: bool, models):
    """A row of two documents, each with an image, has the loss and the gradients of the documents apart."""
    stock, native = models(training, {"text": text})
    names = stock_names(stock)
    rows = [inputs_of((((2, 1),),), seed=1), inputs_of((((3, 2),),), seed=2)]
    rows[0] = {name: value if name == "pixel_values" else value[:, :11] for name, value in rows[0].items()}
    count = sum(int((row["labels"][:, 1:] != -100).sum()) for row in rows)
    expected = 0
    stock.zero_grad()
    for row in rows:
        loss = stock(**row, num_items_in_batch=count).loss
        loss.backward()
        expected = expected + loss.detach()
    gradients = tower_gradients(stock, names)
    labels = torch.cat([row["labels"] for row in rows], 1)
    labels[0, 11] = -100  # the first token of a document follows nothing
    outputs = native(
        input_ids=torch.cat([row["input_ids"] for row in rows], 1),
        pixel_values=torch.cat([row["pixel_values"] for row in rows]),
        labels=labels,
        position_ids=torch.cat([torch.arange(row["labels"].shape[1]) for row in rows])[None],
        use_cache=False,
        num_items_in_batch=count,
    )
    outputs.loss.backward()
    assert error(outputs.loss, expected) <= FP32
    assert_equal(tower_gradients(native, names), gradients)


@both_modes
@pytest.mark.parametrize("items", [7, torch.tensor(23)], ids=["int", "tensor"])
def test_number_of_items_divides_the_loss(items, training: bool, models):
    stock, native = models(training)
    inputs = inputs_of(IMAGES["tiles"])
    expected = stock(**inputs, num_items_in_batch=items).loss
    assert error(native(**inputs, num_items_in_batch=items).loss, expected) <= FP32
    assert error(native(**inputs).loss, expected) > 0.1
    shifted = torch.nn.functional.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)
    found = native(**inputs, shift_labels=shifted, num_items_in_batch=items).loss
    assert error(found, expected) <= FP32


def test_the_loss_is_fused_in_training(models):
    native = models(True)[1]
    inputs = inputs_of(IMAGES["tiles"])
    assert native(**inputs).logits is None
    assert native.eval()(**inputs).logits.shape == (2, LENGTH, 101)
    assert native(**inputs, logits_to_keep=3).logits.shape == (2, 3, 101)


def test_outputs_have_the_fields_of_the_installed_stock_class(models):
    stock, native = models()
    for placement in ("tiles", "none"):
        inputs = inputs_of(IMAGES[placement])
        assert list(native(**inputs).keys()) == list(stock(**inputs).keys())
        expected, actual = (model(**inputs, use_cache=False, return_dict=False) for model in (stock, native))
        assert [type(value) for value in actual] == [type(value) for value in expected]
        inputs.pop("labels")
        assert list(native.model(**inputs).keys()) == list(stock.model(**inputs).keys())


def test_compiles_without_a_graph_break(models):
    native = models(True)[1]
    inputs = inputs_of(IMAGES["tiles"])
    compiled = torch.compile(native, backend="eager", fullgraph=True)
    assert error(compiled(**inputs).loss, native(**inputs).loss) <= FP32


@pytest.mark.parametrize("vision", ["300M", "6B"])
def test_bf16_is_as_exact_as_stock(vision: str, models):
    stock, native = models(made={"vision": vision}, dtype=torch.bfloat16)
    exact = models(made={"vision": vision}, dtype=torch.bfloat16)[0].double()
    names, found = stock_names(stock), []
    for seed in range(4):
        inputs = inputs_of(IMAGES["tiles"], seed=seed)
        inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
        given = [{**inputs, "pixel_values": inputs["pixel_values"].to(model.dtype)} for model in (native, stock, exact)]
        found.append([results_with_tower(m, names, **g) for m, g in zip((native, stock, exact), given)])
    assert_as_exact(found, factor=1.5, floor=2.0**-8)


@pytest.mark.parametrize("kind", ["more tiles", "fewer tiles", "no tokens"])
def test_images_that_do_not_match_the_tokens(kind: str, models):
    inputs = inputs_of(IMAGES["tiles"])
    if kind == "more tiles":
        inputs["pixel_values"] = torch.cat([inputs["pixel_values"]] * 2)
    elif kind == "fewer tiles":
        inputs["pixel_values"] = inputs["pixel_values"][:2]
    else:
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, 5)
    messages = []
    for model in models():
        with pytest.raises(ValueError, match="Image features and image tokens do not match") as refusal:
            model(**inputs)
        messages.append(str(refusal.value))
    assert messages[1] == messages[0]


@pytest.mark.parametrize("frozen", ["vision_tower", "language_model"])
def test_a_frozen_tower_gets_no_gradients(frozen: str, models):
    """And its layers save nothing for a backward that does not come."""
    stock, native = models(True)
    names, inputs = stock_names(stock), inputs_of(IMAGES["tiles"])
    for model in (stock, native):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name and "lm_head" not in name)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        hidden = native.model.vision_tower(inputs["pixel_values"]).last_hidden_state
    assert hidden.requires_grad == bool(saved) == (frozen != "vision_tower")
    for model in (stock, native):
        model(**inputs).loss.backward()
    actual, expected = tower_gradients(native, names), tower_gradients(stock, names)
    assert 0 < len(expected) < len(names) and not any(frozen in name for name in expected)
    assert_equal(actual, expected)
    assert all(parameter.grad is None for name, parameter in native.named_parameters() if frozen in name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, models):
    """Both towers run each block again in the backward."""
    stock, native = models(True)
    names, inputs = stock_names(stock), inputs_of(IMAGES["tiles"])
    stock(**inputs).loss.backward()
    native.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    native.enable_input_require_grads()
    runs = {"vision": 0, "text": 0}

    def count(tower: str):
        def hook(*_):
            runs[tower] += 1

        return hook

    native.model.vision_tower.encoder.layer[0].attention.register_forward_hook(count("vision"))
    native.model.language_model.layers[0].self_attn.register_forward_hook(count("text"))
    inputs["pixel_values"] = inputs["pixel_values"].requires_grad_()  # reentrant checkpoints need a differentiable input
    native(**inputs).loss.backward()
    assert runs == {"vision": 2, "text": 2}
    assert_equal(tower_gradients(native, names), tower_gradients(stock, names))


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 3}, {"prefill_chunk_size": 5}],
    ids=str,
)
@pytest.mark.parametrize("placement", ["one", "tiles"])
def test_generation(placement: str, options: dict, models):
    stock, native = models()
    inputs = inputs_of(IMAGES[placement])
    inputs.pop("labels")
    mask = torch.ones_like(inputs["input_ids"])
    if len(mask) > 1:
        mask[1, :2] = 0
    options = {**inputs, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False, **options}
    assert torch.equal(native.generate(**options), stock.generate(**options))


@pytest.mark.parametrize("text", TEXTS)
def test_o9_prompt_and_one_token_with_a_cache(text: str, models):
    """A step of one token after a prompt with an image equals the run without a cache."""
    stock, native = models(made={"text": text})
    inputs = inputs_of(IMAGES["tiles"])
    inputs.pop("labels")
    expected = stock(**inputs).logits[:, -1]
    outputs = native(**{**inputs, "input_ids": inputs["input_ids"][:, :-1]}, use_cache=True)
    name = cache_name(native)
    step = native(input_ids=inputs["input_ids"][:, -1:], **{name: outputs[name]})
    assert error(step.logits[:, -1], expected) <= FP32


def test_o5_processor_keys_pass_through(models):
    """Keys that the model does not know go unfiltered to where transformers ignores them."""
    stock, native = models()
    inputs = inputs_of(IMAGES["tiles"])
    extra = {
        "mm_token_type_ids": (inputs["input_ids"] == IMAGE).long(),
        "image_sizes": torch.full((2, 2), 8),
        "num_patches": torch.tensor([3, 1, 2]),
    }
    assert torch.equal(native(**inputs, **extra).logits, native(**inputs).logits)
    assert error(native(**inputs, **extra).loss, stock(**inputs).loss) <= FP32


def test_o50_gated_mlp_runs_in_every_layer(models, monkeypatch):
    native = models(True)[1]
    calls, fused = [], ops.gated_mlp
    monkeypatch.setattr(ops, "gated_mlp", lambda *arguments: calls.append(arguments[-1]) or fused(*arguments))
    native(**inputs_of(IMAGES["tiles"]))
    assert calls == ["silu"] * native.config.text_config.num_hidden_layers


def test_o51_unsupported_types_are_refused():
    config = configuration()
    config.text_config.model_type = "mamba"
    with pytest.raises(ValueError, match="a text model of type 'mamba': LigerInternVLModel has gpt_oss, llama, qwen2, "):
        LigerInternVLModel(config)
    config = configuration()
    config.vision_config = configuration().text_config
    with pytest.raises(ValueError, match="a vision encoder of type 'qwen2'"):
        LigerInternVLModel(config)
    config = configuration()
    config.vision_config.norm_type = "batch_norm"
    with pytest.raises(ValueError, match="norm_type 'batch_norm'"):
        LigerInternVLModel(config)
    with pytest.raises(ValueError, match=r"downsample_ratio 0\.4"):
        LigerInternVLModel(configuration(downsample_ratio=0.4))


@both_modes
def test_o52_what_an_image_shows_changes_the_loss(training: bool, models):
    """Also the fused loss, and the gradient of the pixels is not zero."""
    native = models(training)[1]
    inputs = inputs_of(IMAGES["tiles"])
    loss = native(**inputs).loss
    pixels = (inputs.pop("pixel_values") + 0.5).requires_grad_()
    other = native(**inputs, pixel_values=pixels).loss
    other.backward()
    assert error(other, loss) > 1e-3
    assert all(tile.norm() > 0 for tile in pixels.grad)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def new_layout(tensors: dict) -> dict:
    """The keys under the stock class's parameter names; what save_pretrained writes is the layout of older checkpoints."""
    renamed = {}
    for key, tensor in tensors.items():
        key = key.replace("language_model.model.", "model.language_model.", 1).replace("language_model.lm_head", "lm_head", 1)
        renamed[re.sub("^(vision_tower|multi_modal_projector)", r"model.\1", key)] = tensor
    return renamed


# Names of an encoder's layer, in the stock layout and in OpenGVLab's.
ORIGINAL_NAMES = {
    "attention.qkv": "attn.qkv",
    "attention.projection_layer": "attn.proj",
    "attention.q_norm": "attn.q_norm",
    "attention.k_norm": "attn.k_norm",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_1": "ls1",
    "lambda_2": "ls2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
ORIGINAL_OUTSIDE = {
    "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
    "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
    "vision_tower.embeddings.patch_embeddings.projection.weight": "vision_model.embeddings.patch_embedding.weight",
    "vision_tower.embeddings.patch_embeddings.projection.bias": "vision_model.embeddings.patch_embedding.bias",
    "multi_modal_projector.layer_norm.weight": "mlp1.0.weight",
    "multi_modal_projector.layer_norm.bias": "mlp1.0.bias",
    "multi_modal_projector.linear_1.weight": "mlp1.1.weight",
    "multi_modal_projector.linear_1.bias": "mlp1.1.bias",
    "multi_modal_projector.linear_2.weight": "mlp1.3.weight",
    "multi_modal_projector.linear_2.bias": "mlp1.3.bias",
}


def original_layout(tensors: dict) -> dict:
    """Tensors in the older stock layout -> in the layout of InternVLChatModel, made by hand."""
    found, tensors = {}, dict(tensors)
    for key in list(tensors):
        if key.startswith("vision_tower.encoder.layer.") and ".q_proj." in key:
            parts = [tensors.pop(key.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            tensors[key.replace("q_proj", "qkv")] = torch.cat(parts)
    for key, tensor in tensors.items():
        if key.startswith("vision_tower.encoder.layer."):
            number, name = key.removeprefix("vision_tower.encoder.layer.").split(".", 1)
            stock = next(stock for stock in ORIGINAL_NAMES if name == stock or name.startswith(f"{stock}."))
            key = f"vision_model.encoder.layers.{number}.{ORIGINAL_NAMES[stock]}{name.removeprefix(stock)}"
        found[ORIGINAL_OUTSIDE.get(key, key)] = tensor
    assert not any(key.startswith(("vision_tower", "multi_modal")) for key in found)
    return found


INTERNLM2_NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def internlm2_layout(tensors: dict, key_value_heads: int = 2, head_dim: int = 8) -> dict:
    """The text model's tensors as InternLM2 has them, in the layout of InternVLChatModel: for each key-value head its query
    heads, its keys and its values."""
    found, tensors = {}, dict(tensors)
    for key in [key for key in tensors if key.startswith("language_model.") and ".q_proj." in key]:
        q, k, v = (tensors.pop(key.replace("q_proj", f"{part}_proj")) for part in "qkv")
        group, rows = len(q) // key_value_heads, []
        for head in range(key_value_heads):
            rows.append(q[head * group : (head + 1) * group])
            rows += [part[head * head_dim : (head + 1) * head_dim] for part in (k, v)]
        found[key.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(rows)
    for key, tensor in tensors.items():
        if key.startswith("language_model."):
            for stock, other in INTERNLM2_NAMES.items():
                key = key.replace(f".{stock}.", f".{other}.")
        found[key] = tensor
    return found


def original_config(config: InternVLConfig, **changes) -> dict:
    """What OpenGVLab's config.json says, as far as it matters, and some of what does not."""
    text, vision = config.text_config.to_dict(), config.vision_config
    stem = {"qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}.get(text["model_type"]) or text["model_type"].capitalize()
    rope = text.pop("rope_parameters")
    return {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "model_type": "internvl_chat",
        "downsample_ratio": config.downsample_ratio,
        "dynamic_image_size": True,
        "force_image_size": 8,
        "llm_config": {
            **{name: value for name, value in text.items() if name not in ("dtype", "layer_types", "transformers_version")},
            "architectures": [f"{stem}ForCausalLM"],
            "attn_implementation": "flash_attention_2",
            **({"rope_parameters": rope} if text["model_type"] in MIXTURES else {"rope_theta": rope["rope_theta"]}),
            "moe_config": None,
            "torch_dtype": "bfloat16",
            "use_bfloat16": True,
            "use_cache": False,
        },
        "max_dynamic_patch": 12,
        "ps_version": "v2",
        "select_layer": config.vision_feature_layer,
        "template": "internvl2_5",
        "torch_dtype": "float32",
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": True,
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "model_type": "intern_vit_6b",
            "attention_dropout": 0.0,
            "drop_path_rate": 0.0,
            "dropout": 0.0,
            "hidden_act": vision.hidden_act,
            "hidden_size": vision.hidden_size,
            "image_size": vision.image_size[0],
            "initializer_factor": 0.1,
            "intermediate_size": vision.intermediate_size,
            "layer_norm_eps": 1e-06,
            "norm_type": vision.norm_type,
            "num_attention_heads": vision.num_attention_heads,
            "num_channels": 3,
            "num_hidden_layers": vision.num_hidden_layers,
            "patch_size": vision.patch_size[0],
            "qk_normalization": vision.use_qk_norm,
            "qkv_bias": vision.attention_bias,
            "torch_dtype": "bfloat16",
            "use_flash_attn": True,
        },
        **changes,
    }


@pytest.fixture
def original(folders, tmp_path):
    """A folder in OpenGVLab's layout, of the weights of a stock folder."""

    def make(changes: dict | None = None, tokenizer: dict | None = None, **options):
        folder = tmp_path / "original"
        folder.mkdir(exist_ok=True)
        config = original_config(configuration(**options), **(changes or {}))
        (folder / "config.json").write_text(json.dumps(config))
        files = {"added_tokens.json": {"<img>": 97, "<IMG_CONTEXT>": IMAGE}} if tokenizer is None else tokenizer
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        write_tensors(folder, original_layout(read_tensors(folders(**options))))
        return folder

    return make


@pytest.mark.parametrize(
    "text, tied", [*((text, tied) for text in TEXTS for tied in (True, False)), *((text, False) for text in MIXTURES)]
)
def test_o6_o40_every_layout_is_read_and_kept(text: str, tied: bool, folders, tmp_path):
    """Also with a tied head: the same tensors come in, and what the stock class writes goes out, to the bit."""
    made = {"text": text, "tied": tied}
    tensors = read_tensors(folders(**made))
    assert any(key.endswith("lm_head.weight") for key in tensors) != tied
    renamed = new_layout(tensors)
    assert set(renamed).isdisjoint(tensors)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text((folders(**made) / "config.json").read_text())
    write_tensors(tmp_path / "new", renamed)
    states = []
    for source in (folders(**made), tmp_path / "new"):
        stock, native = (cls.from_pretrained(source) for cls in CLASSES)
        assert (native.lm_head.weight is native.get_input_embeddings().weight) == tied
        expected = export(stock, tmp_path / "stock")
        assert_same_tensors(export(native, tmp_path / "native"), expected)
        assert_same_tensors(expected, read_tensors(source))
        states.append(native.state_dict())
    assert_same_tensors(*states)
    info = InternVLForConditionalGeneration.from_pretrained(tmp_path / "native", output_loading_info=True)[1]
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert json.loads((tmp_path / "native" / "config.json").read_text())["architectures"] == [stock.__class__.__name__]


@pytest.mark.parametrize(
    "text, vision, tied",
    [("qwen2", "300M", True), ("qwen3", "6B", False), *((text, "300M", False) for text in ("llama", "qwen3_moe", "gpt_oss"))],
)
def test_original_layout(text: str, vision: str, tied: bool, original, folders, tmp_path):
    """Its tensors arrive where the stock class has them, and go out in the stock layout."""
    made = {"text": text, "vision": vision, "tied": tied}
    native = LigerInternVLForConditionalGeneration.from_pretrained(original(**made))
    stock = InternVLForConditionalGeneration.from_pretrained(folders(**made))
    assert_same_tensors(export(native, tmp_path / "out"), read_tensors(folders(**made)))
    compare((stock.eval(), native.eval()), **inputs_of(IMAGES["tiles"]))
    compare((stock.train(), native.train()), True, **inputs_of(IMAGES["two, one"]))
    again = InternVLForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    inputs = inputs_of(IMAGES["one"])
    assert torch.equal(again(**inputs).logits, stock.eval()(**inputs).logits)


@pytest.mark.parametrize("bias", [True, False])
def test_original_layout_with_internlm2(bias: bool, original, tmp_path):
    """A Llama whose q, k and v are fused group by group."""
    config = configuration("llama")
    config.text_config.attention_bias = bias
    stock = InternVLForConditionalGeneration(config)
    randomise(stock)
    expected = export(stock, tmp_path / "stock")
    text = original_config(config)["llm_config"]
    text.update(architectures=["InternLM2ForCausalLM"], model_type="internlm2", bias=text.pop("attention_bias"))
    text["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    source = original({"llm_config": text}, text="llama")
    write_tensors(source, internlm2_layout(original_layout(expected)))
    native = LigerInternVLForConditionalGeneration.from_pretrained(source)
    assert native.config.text_config.rope_parameters["rope_type"] == "dynamic"
    assert_same_tensors(export(native, tmp_path / "native"), expected)
    compare((stock.eval(), native.eval()), **inputs_of(IMAGES["tiles"]))
    assert_same_tensors(LigerInternVLModel.from_pretrained(source).state_dict(), native.model.state_dict())


def test_original_configuration(original):
    source = original(
        {"downsample_ratio": 0.25, "force_image_size": 16, "select_layer": -2},
        {"tokenizer_config.json": {"added_tokens_decoder": {"98": {"content": "<IMG_CONTEXT>"}}}},
        vision_feature_layer=-2,
        downsample_ratio=0.25,
    )
    model, info = LigerInternVLForConditionalGeneration.from_pretrained(source, output_loading_info=True)
    assert not info["missing_keys"] and model._weight_conversions is None
    config, expected = model.config, configuration(vision_feature_layer=-2, downsample_ratio=0.25)
    assert (config.image_token_id, config.vision_feature_layer, config.downsample_ratio) == (98, -2, 0.25)
    assert config.image_seq_length == (16 // 2) ** 2 * 0.25**2
    assert not config.tie_word_embeddings and config.text_config.use_cache
    for name in ("rope_parameters", "hidden_size", "num_key_value_heads", "vocab_size", "layer_types", "rms_norm_eps"):
        assert getattr(config.text_config, name) == getattr(expected.text_config, name), name
    for name in expected.vision_config.to_dict():
        if name not in ("dtype", "transformers_version", "architectures", "_name_or_path"):
            assert getattr(config.vision_config, name) == getattr(expected.vision_config, name), name
    assert config.vision_config._attn_implementation == config.text_config._attn_implementation == "sdpa"
    given = LigerInternVLForConditionalGeneration.from_pretrained(source, image_token_id=7, dtype=torch.bfloat16)
    assert given.config.image_token_id == 7 and given.dtype == torch.bfloat16
    given = LigerInternVLForConditionalGeneration.from_pretrained(source, config=expected)
    assert given.config.image_token_id == IMAGE
    native = LigerInternVLForConditionalGeneration.from_pretrained(original({"torch_dtype": "bfloat16"}))
    assert native.dtype == torch.bfloat16  # transformers' default is the checkpoint's


def test_what_an_original_configuration_leaves_out_is_the_originals_default(tmp_path):
    """InternVisionConfig's defaults, which are not those of the stock class."""
    text = original_config(configuration())["llm_config"]
    original = {"model_type": "internvl_chat", "ps_version": "v2", "vision_config": {"dropout": 0.1}, "llm_config": text}
    (tmp_path / "config.json").write_text(json.dumps(original))
    config, rest = translated_configuration(tmp_path, read_original(tmp_path, {}), {}, {"image_token_id": 5, "dtype": "auto"})
    vision = config.vision_config
    assert (vision.hidden_size, vision.num_hidden_layers, vision.num_attention_heads) == (3200, 48, 25)
    assert (vision.norm_type, vision.use_qk_norm, vision.attention_bias) == ("rms_norm", True, False)
    assert (vision.projection_dropout, vision.attention_dropout, vision.hidden_dropout_prob) == (0.1, 0.0, 0.0)
    assert (config.image_token_id, config.image_seq_length) == (5, (224 // 14) ** 2 // 4)
    assert rest == {"dtype": "auto"}


@pytest.mark.parametrize(
    "tokenizer, found",
    [
        ({"tokenizer.json": {"added_tokens": [{"id": 97, "content": "<img>"}, {"id": 98, "content": "<IMG_CONTEXT>"}]}}, 98),
        ({"added_tokens.json": {"<img>": 97}}, 151667),
        ({}, 151667),
    ],
    ids=["tokenizer.json", "another token", "none"],
)
def test_image_token_of_an_original_checkpoint(tokenizer: dict, found: int, original):
    source = original(tokenizer=tokenizer)
    assert LigerInternVLForConditionalGeneration.from_pretrained(source).config.image_token_id == found


def test_the_image_token_of_a_text_model_without_a_usual_one_has_to_be_found(original):
    source = original(tokenizer={}, text="gpt_oss")
    with pytest.raises(NotImplementedError, match="image_token_id="):
        LigerInternVLForConditionalGeneration.from_pretrained(source)
    assert LigerInternVLForConditionalGeneration.from_pretrained(source, image_token_id=7).config.image_token_id == 7


def _changed(part: str, **changes) -> dict:
    return {part: {**original_config(configuration(vision="6B"))[part], **changes}}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ps_version": "v1"}, "ps_version 'v1'"),
        ({"use_llm_lora": 16}, "use_llm_lora: merge the adapters"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
        (_changed("llm_config", architectures=["Phi3ForCausalLM"]), "Phi3ForCausalLM, whose original layout"),
        (_changed("vision_config", layer_norm_eps=1e-5), "epsilon of 1e-05"),
    ],
    ids=["pixel shuffle", "adapters", "quantised", "text model", "epsilon"],
)
def test_original_checkpoints_that_are_refused(changes: dict, message: str, original):
    with pytest.raises(NotImplementedError, match=message):
        LigerInternVLForConditionalGeneration.from_pretrained(original(changes, vision="6B"))


def test_a_given_configuration_does_not_lift_a_refusal(original):
    with pytest.raises(NotImplementedError, match="ps_version 'v1'"):
        LigerInternVLForConditionalGeneration.from_pretrained(original({"ps_version": "v1"}), config=configuration())


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="nothing"):
        LigerInternVLForConditionalGeneration.from_pretrained(tmp_path / "nothing")


def test_no_code_of_an_original_checkpoint_is_run(original):
    source = original()
    (source / "configuration_internvl_chat.py").write_text("raise AssertionError('code of a checkpoint was run')")
    native = liger_models.LigerAutoModelForCausalLM.from_pretrained(source)
    assert type(native) is LigerInternVLForConditionalGeneration


def test_base_models(folders, original, tmp_path):
    stock, native = (cls.from_pretrained(folders()).eval() for cls in (InternVLModel, LigerInternVLModel))
    inputs = inputs_of(IMAGES["tiles"])
    inputs.pop("labels")
    assert error(native(**inputs).last_hidden_state, stock(**inputs).last_hidden_state) <= FP32
    assert_same_tensors(export(native, tmp_path / "native"), export(stock, tmp_path / "stock"))
    from_original = LigerInternVLModel.from_pretrained(original())
    assert_same_tensors(from_original.state_dict(), native.state_dict())


def test_encoder_alone(folders, tmp_path):
    tower = InternVLForConditionalGeneration.from_pretrained(folders(vision="norms and biases")).model.vision_tower
    tower.save_pretrained(tmp_path / "tower")
    stock, native = (cls.from_pretrained(tmp_path / "tower").eval() for cls in (InternVLVisionModel, LigerInternVLVisionModel))
    pixels = inputs_of(IMAGES["one"])["pixel_values"]
    assert error(native(pixels).last_hidden_state, stock(pixels).last_hidden_state) <= FP32
    assert_same_tensors(export(native, tmp_path / "native"), read_tensors(tmp_path / "tower"))


@pytest.mark.parametrize(
    "layout, missing, named",
    [
        ("stock", "vision_tower.encoder.layer.1.attention.k_proj.weight", "1.attention.k_proj.weight"),
        ("stock", "multi_modal_projector.linear_2.bias", "multi_modal_projector.linear_2.bias"),
        ("stock", "language_model.model.layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
        ("original", "vision_model.encoder.layers.1.attn.qkv.weight", "1.attention.k_proj.weight"),
        ("original", "vision_model.embeddings.class_embedding", "vision_tower.embeddings.cls_token"),
        ("original", "mlp1.3.bias", "multi_modal_projector.linear_2.bias"),
        ("original", "language_model.model.layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
    ],
)
def test_missing_and_extra_keys_are_named(layout: str, missing: str, named: str, folders, original, tmp_path):
    source = original() if layout == "original" else folders()
    tensors = read_tensors(source)
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    write_tensors(tmp_path, {name: tensor for name, tensor in tensors.items() if name != missing})
    assert missing in tensors
    with pytest.raises(CheckpointError, match=rf"missing key .*{re.escape(named)}"):
        LigerInternVLForConditionalGeneration.from_pretrained(tmp_path)
    extra = f"{missing.partition('.')[0]}.extra.weight"
    write_tensors(tmp_path, {**tensors, extra: torch.zeros(1)})
    with pytest.raises(CheckpointError, match=rf"unexpected key .*{re.escape(extra)}"):
        LigerInternVLForConditionalGeneration.from_pretrained(tmp_path)


def test_stock_keys_and_parts_have_their_stock_names(models):
    stock, native = models(made={"vision": "norms and biases"})
    modules = {name for name, module in stock.named_modules() if isinstance(module, torch.nn.Linear)}
    assert modules <= {name for name, module in native.named_modules() if isinstance(module, torch.nn.Linear)}
    fresh = LigerInternVLForConditionalGeneration(native.config)
    fresh.load_state_dict(stock.state_dict())
    assert_same_tensors(fresh.state_dict(), native.state_dict())


@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModelForImageTextToText])
def test_auto_classes(auto_class, folders):
    def loaded():
        try:
            return type(auto_class.from_pretrained(folders()))
        except ValueError:  # AutoModelForCausalLM knows no InternVL by itself
            return None

    before = loaded()
    with liger_models.register_auto_models():
        assert loaded() is LigerInternVLForConditionalGeneration
    assert loaded() is before
    native = liger_models.LigerAutoModelForCausalLM.from_pretrained(folders())
    assert type(native) is LigerInternVLForConditionalGeneration


def test_a_new_model_has_the_stock_distribution():
    config = configuration(vision="norms and biases")
    stock, native = (cls(config) for cls in CLASSES)
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
    """O3: of gradient accumulation over batches with unequal numbers of labels, and of evaluation: the Trainer sends
    num_items_in_batch to both."""
    losses, evaluated, rows = [], [], []
    for seed, places in enumerate((((2, 2),), ((5, 1),), ((3, 1),), ((1, 1), (11, 1)))):
        inputs = inputs_of((places,), seed=seed)
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
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            optim="sgd",
            logging_steps=1,
            save_strategy="no",
            prediction_loss_only=True,
            report_to=[],
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate)
        trainer.train()
        losses.append(torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
        evaluated.append(trainer.evaluate()["eval_loss"])
    assert len(losses[0]) == 3 and losses[0].unique().numel() == 3
    # The log may round to four digits, a unit of 1e-4.
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1.5e-4)
    assert abs(evaluated[1] - evaluated[0]) <= 1.5e-4


def test_lora_on_both_towers(models):
    """A target list of the stock model's names reaches the parts of both towers' packed layers."""
    peft = pytest.importorskip("peft")
    found = []
    for model in models(True):
        torch.manual_seed(0)
        options = peft.LoraConfig(target_modules=["q_proj", "v_proj", "projection_layer"], r=2, init_lora_weights=False)
        adapted = peft.get_peft_model(model, options)
        outputs = adapted(**inputs_of(IMAGES["tiles"]))
        outputs.loss.backward()
        gradients = {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}
        assert len(gradients) == 2 * 2 * (3 + 2)
        found.append({"loss": outputs.loss.detach(), **gradients})
    assert_equal(found[1], found[0])


def test_blocks_are_found_by_those_who_wrap_them(folders):
    native = LigerInternVLForConditionalGeneration.from_pretrained(folders())
    assert {"LigerInternVLVisionBlock", "LigerQwen2Block"} <= set(native._no_split_modules)
    blocks = [module for module in native.modules() if isinstance(module, LigerInternVLVisionBlock)]
    assert len(blocks) == 2 and all(isinstance(block.attention, LigerNormedVisionAttention) for block in blocks)
