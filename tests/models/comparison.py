"""How a native model is compared with the stock model that has the same weights: by name, each tensor, norm-wise."""

import inspect

import torch
from torch import nn

# Two runs in fp32 that differ in the order of their sums: some ten roundings follow each other in a layer and as many in its
# backward, of half a spacing (2⁻²⁴) each. Three layers that add up linearly make 60 of them.
FP32 = 64 * 2.0**-24


def inputs_of(model: nn.Module, rows: int = 2, length: int = 13, seed: int = 1) -> dict[str, torch.Tensor]:
    """Token ids without special tokens, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, model.config.vocab_size, (rows, length), generator=generator)
    labels = torch.randint(3, model.config.vocab_size, (rows, length), generator=generator)
    if length > 4:
        labels[0, :4] = -100
        labels[-1, -2] = -100
    return {"input_ids": tokens, "labels": labels}


def stock_names(model: nn.Module) -> list[str]:
    """The names of a stock model's parameters, tied ones once."""
    return [name for name, _ in model.named_parameters()]


def stock_gradients(model: nn.Module, names: list[str]) -> dict[str, torch.Tensor | None]:
    """A model's gradients under the names of the stock parameters.

    A parameter that the native model packs is found through the part module of the stock name: its weight is a view, whose
    place in the storage of the packed parameter says which rows of the packed gradient are its own.
    """
    own = dict(model.named_parameters())
    places = {parameter.untyped_storage().data_ptr(): parameter for parameter in own.values()}
    gradients = {}
    for name in names:
        if name in own:
            gradients[name] = own[name].grad
            continue
        module, _, kind = name.rpartition(".")
        owner = model.get_submodule(module)
        if hasattr(owner, "to_stock"):  # its layout is another one
            (native_name,) = (native for native, stock in owner.stock_names.items() if stock == kind)
            gradient = getattr(owner, native_name).grad
            gradients[name] = None if gradient is None else owner.to_stock(native_name, gradient)
            continue
        part = getattr(owner, kind)
        packed = places[part.untyped_storage().data_ptr()]
        start = part.storage_offset() - packed.storage_offset()
        gradients[name] = None if packed.grad is None else packed.grad.as_strided(part.shape, part.stride(), start)
    return gradients


def results(model: nn.Module, names: list[str] | None = None, weights: torch.Tensor | None = None, **inputs) -> dict:
    """Run a model forward and backward.

    Args:
        model: stock or native; its gradients are cleared before and after.
        names: stock names of the parameters whose gradients are wanted; none are computed if it is None.
        weights: if given, the backward starts from the loss plus the sum of logits times these.
        inputs: as the model takes them.

    Returns:
        loss, logits, hidden states, attentions and gradients by stock name; what is None is left out.
    """
    model.zero_grad()
    outputs = model(**inputs)
    found = {name: outputs[name] for name in ("loss", "logits", "last_hidden_state") if outputs.get(name) is not None}
    for name in ("hidden_states", "attentions"):
        found.update({f"{name} {index}": value for index, value in enumerate(outputs.get(name) or ())})
    if names is not None:
        target = 0 if outputs.get("loss") is None else outputs.loss
        if weights is not None:
            target = target + (outputs.logits * weights).sum()
        target.backward()
        gradients = stock_gradients(model, names)
        found.update({f"gradient of {name}": g.clone() for name, g in gradients.items() if g is not None})
        model.zero_grad()
    return {name: tensor.detach() for name, tensor in found.items()}


def results_with_tower(model: nn.Module, names: list[str], **inputs) -> dict[str, torch.Tensor]:
    """As results, but for the key biases of a vision tower: without a rotation or a norm they move all scores of a query alike,
    so that their gradients are rounding."""
    found = results(model, names, **inputs)
    rounding = FP32 if model.dtype != torch.bfloat16 else 2.0**-6
    for name in [name for name in found if "vision_tower" in name and name.endswith("k_proj.bias")]:
        if name.replace("k_proj.bias", "k_norm.weight") not in found:
            assert found.pop(name).norm() <= rounding * found[name.replace("k_proj", "v_proj")].norm()
    return found


def tower_gradients(model: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    """Likewise, of a backward that has been run."""
    gradients = stock_gradients(model, names)
    return {n: g for n, g in gradients.items() if g is not None and not ("vision_tower" in n and n.endswith("k_proj.bias"))}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, relative to the norm of the expected tensor."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    scale = expected.double().norm().item()
    return (actual.double() - expected.double()).norm().item() / max(scale, 1e-30)


def assert_equal(actual: dict, expected: dict, tolerance: float = FP32, without: tuple[str, ...] = ()) -> None:
    """Each tensor is within `tolerance` of its namesake, and neither side has one more, but for the names in `without`."""
    expected = {name: tensor for name, tensor in expected.items() if name not in without}
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    found = {name: error(tensor, expected[name]) for name, tensor in actual.items()}
    # Gradients of sinks and of routers' biases are sums over all tokens of terms of either sign: more of them cancels.
    allowed = {name: 4 * tolerance if name.endswith(("sinks", "router.bias")) else tolerance for name in found}
    wrong = {name: f"{value:.2g}" for name, value in found.items() if not value <= allowed[name]}
    assert not wrong, f"relative errors above {tolerance:.2g}: {wrong}"


def assert_as_exact(runs: list[list[dict]], factor: float, floor: float) -> None:
    """Each tensor of the native model is as near to the exact one as the stock model's own.

    Args:
        runs: for each of some inputs the results of the native, the stock and the exact model.
        factor, floor: what the native model's error, the root mean square over the runs, may be: `factor` times the stock
            model's, plus `floor`.
    """
    wrong = {}
    for name, tensor in runs[0][0].items():
        assert tensor.dtype == runs[0][1][name].dtype, f"{name}: {tensor.dtype}, not {runs[0][1][name].dtype}"
        errors = torch.tensor([[error(model[name], exact[name]) for model in models] for *models, exact in runs])
        found, of_stock = errors.double().square().mean(0).sqrt().tolist()
        # Few numbers, in which the terms of many tokens cancel: over some inputs they differ by chance up to threefold.
        allowed = 2 * factor if name.endswith(("sinks", "router.bias")) else factor
        if not found <= allowed * of_stock + floor:
            wrong[name] = f"{found:.2g}, stock {of_stock:.2g}"
    assert not wrong, f"further from fp64 than the stock model: {wrong}"


def document_masks(model: nn.Module, position_ids: torch.Tensor) -> dict:
    """What a stock model has to be given beside `position_ids` [rows, length] to keep the documents apart that begin at 0.

    Most find them by themselves. Stock GPT-OSS does not pass positions on to its masks.
    """
    if model.config.model_type != "gpt_oss":
        return {}
    document, place = (position_ids == 0).cumsum(-1), torch.arange(position_ids.shape[1])
    visible = (document[:, :, None] == document[:, None, :]) & (place[:, None] >= place)
    near = place[:, None] - place < model.config.sliding_window
    lowest = torch.finfo(model.dtype).min
    masks = {"full_attention": visible, "sliding_attention": visible & near}
    return {
        "attention_mask": {
            kind: torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, lowest)[:, None] for kind, mask in masks.items()
        }
    }


def cache_name(model: nn.Module) -> str:
    """What forward and its output call the cache: `cache` since transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"
