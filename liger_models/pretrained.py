"""Loading stock checkpoints strictly and saving them whole: what every native class adds to transformers' PreTrainedModel."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, initialization
from transformers.conversion_mapping import get_model_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from liger_models.layers.attention import LigerAttention
from liger_models.layers.linear import PackedLinear
from liger_models.layers.moe import LigerClampedExperts, LigerExperts, LigerSoftmaxTopKRouter, LigerTopKSoftmaxRouter
from liger_models.layers.norm import LigerRMSNorm

logger = logging.get_logger(__name__)

# The arguments of from_pretrained that say where a checkpoint's files come from.
HUB_OPTIONS = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")


class CheckpointError(ValueError):
    """A checkpoint that does not fit the model. The message names each key, and for a wrong shape both shapes."""


class LigerPreTrainedModel(PreTrainedModel):
    """Base of all native classes.

    Class attributes of a family:
        config_class: the stock configuration class.
        stock_name: name of the stock class whose checkpoints this class reads and writes.
        checkpoint_mapping: the family's weight mapping (on the base model's class; heads inherit it).
        new_keys: parameters that a checkpoint may lack because they belong to a new head.
        unused_keys: keys that a checkpoint may have because they belong to another head.
        weight_formats: the formats in which the class reads and writes checkpoints: "stock", and quantised ones ("mxfp4").
        model_class: of a head, the class of its base model, from which it has its configuration class, the modules that are
            not split over devices, and whether scaled_dot_product_attention can serve.
    """

    stock_name: ClassVar[str]
    checkpoint_mapping: ClassVar[list | None] = None
    new_keys: ClassVar[frozenset[str]] = frozenset()
    unused_keys: ClassVar[frozenset[str]] = frozenset()
    weight_formats: ClassVar[tuple[str, ...]] = ("stock",)

    #: The format in which a checkpoint is being written.
    weight_format = "stock"
    #: The configuration's `quantization_config` in the checkpoint that was loaded, if its weights were dequantised.
    stored_quantization: dict[str, Any] | None = None

    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init_subclass__(cls, **kwargs):
        base = cls.__dict__.get("model_class")
        if base is not None:
            cls.config_class, cls._no_split_modules = base.config_class, base._no_split_modules
            cls._supports_sdpa, cls.weight_formats = base._supports_sdpa, base.weight_formats
        super().__init_subclass__(**kwargs)
        # transformers looks the mapping up by class name. Subclasses have other names, also the class that FSDP2 makes.
        if cls.checkpoint_mapping is not None:
            register_checkpoint_conversion_mapping(cls.__name__, cls.checkpoint_mapping, overwrite=True)

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        if not isinstance(config, self.config_class):
            raise TypeError(
                f"{type(self).__name__} takes a {self.config_class.__name__}, not a {type(config).__name__}: use the class of "
                f"that family"
            )
        super().__init__(config, *args, **kwargs)

    def post_init(self) -> None:
        super().post_init()
        self._tp_plan = {}  # the stock plan, which transformers has just merged in, names parts that share one parameter

    def _get_name(self) -> str:
        # The Trainer goes by this name to find out whether label smoothing has to shift the labels.
        return self.stock_name

    def __repr__(self) -> str:
        return type(self).__name__ + super().__repr__().removeprefix(self.stock_name)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # transformers leaves out modules without parameters of their own in classes that are not its own, because these may
        # overwrite what was loaded. `_init_weights` of this package goes by the same flags as transformers' own.
        super()._initialize_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PackedLinear):
            initialization.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if module.bias is not None:
                initialization.zeros_(module.bias)
        elif isinstance(module, LigerRMSNorm):
            initialization.constant_(module.weight, 1.0 - module.offset)
        elif isinstance(module, (LigerExperts, LigerClampedExperts)):
            for parameter in module.parameters(recurse=False):
                std = self.config.initializer_range if parameter.dim() == 3 else 0.0  # biases are zero
                initialization.normal_(parameter, mean=0.0, std=std)
        elif isinstance(module, (LigerSoftmaxTopKRouter, LigerTopKSoftmaxRouter)):
            for parameter in module.parameters(recurse=False):
                initialization.normal_(parameter, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, LigerAttention) and module.sinks is not None:
            initialization.normal_(module.sinks, mean=0.0, std=self.config.initializer_range)
        else:
            super()._init_weights(module)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        # Where scaled_dot_product_attention cannot serve, the stock class falls back to products of whole score matrices.
        if requested_attention is None and not self._supports_sdpa:
            requested_attention = "liger"
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    # -- loading ----------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """Load a stock checkpoint: every argument as in transformers, but every key has to be accounted for.

        Quantised weights in one of the class's `weight_formats` are dequantised to the model's dtype.

        Raises:
            CheckpointError: a key is missing, unexpected or has a wrong shape; a file is not readable; or the checkpoint
                belongs to another architecture.
            NotImplementedError: an argument that shards, quantises or reorders weights while they are loaded, which would cut
                packed weights in the wrong places.
        """
        _refuse_loading(cls, kwargs)
        stored = _checked_configuration(cls, pretrained_model_name_or_path, kwargs)
        quantization = stored.get("quantization_config")
        kwargs.pop("quantization_config", None)  # one that asks to dequantise, which happens anyway
        if quantization is not None:
            kwargs = _without_quantization(cls, pretrained_model_name_or_path, kwargs)
        try:
            with _one_weight_at_a_time() if quantization is not None else nullcontext():
                loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        except SafetensorError as error:
            raise CheckpointError(
                f"{pretrained_model_name_or_path}: a weight file is damaged or cut off ({error}); download or copy it again"
            ) from error
        if quantization is not None:
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info
            model.stored_quantization = quantization
        return loaded

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        source = load_config.pretrained_model_name_or_path
        problems = [_last_line(text) for text in loading_info.conversion_errors.values()]
        if not load_config.ignore_mismatched_sizes:
            problems += [
                f"size mismatch for {key}: {tuple(there)} in the checkpoint, {tuple(here)} in the model"
                for key, there, here in loading_info.mismatched_keys
            ]
        if problems:
            raise CheckpointError(_report(type(model), source, problems))
        loading_info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        missing = sorted(loading_info.missing_keys - model.new_keys)
        unexpected = sorted(loading_info.unexpected_keys - model.unused_keys)
        if not missing and not unexpected:
            return loading_info
        parts = model._packed_parts()
        problems = [f"missing key {stock}" for key in missing for stock in model._stock_keys(key, parts)]
        problems += [
            f"unexpected key {' or '.join(dict.fromkeys([*model._stock_keys(key, parts), key]))}" for key in unexpected
        ]
        raise CheckpointError(_report(type(model), source, problems))

    def _packed_parts(self) -> dict[str, tuple[str, ...]]:
        """For each packed layer that the family's mapping names, its parts. Blocks of another kind may not have it."""
        return {
            conversion.target_patterns[0].rpartition(".")[2]: conversion.operations[0].part_names
            for conversion in get_model_conversion_mapping(self, add_legacy=False)
            if isinstance(conversion, WeightConverter) and hasattr(conversion.operations[0], "part_names")
        }

    def _stock_keys(self, key: str, parts: dict[str, tuple[str, ...]]) -> list[str]:
        """The keys in a stock checkpoint that a native key stands for: its own, or those of a packed layer's parts."""
        module_name, _, kind = key.rpartition(".")
        owner, _, name = module_name.rpartition(".")
        module = dict(self.named_modules()).get(module_name)
        if isinstance(module, (LigerExperts, LigerClampedExperts)) and kind in module._parameters:
            return [f"{module_name}.{stock}" for stock in module.stock_keys(kind)]
        return [f"{owner}.{part}.{kind}" for part in parts.get(name, (name,))] if owner else [key]

    # -- saving -----------------------------------------------------------------------------------------------------

    def save_pretrained(
        self,
        save_directory,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        *,
        weight_format: str = "stock",
        **kwargs,
    ) -> None:
        """Write a stock checkpoint: stock keys, shapes and `architectures`. Arguments as in transformers, and:

        Args:
            weight_format: one of the class's `weight_formats`. "stock" writes every weight in its own dtype; "mxfp4"
                quantises the experts as in the published GPT-OSS checkpoints, and gives experts that were loaded from MXFP4
                and have not changed their own bits back.

        The files are written next to their place and moved there once all of them are whole, so a failure leaves the
        directory as it was.
        """
        if weight_format not in self.weight_formats:
            raise ValueError(
                f"{type(self).__name__}.save_pretrained(weight_format={weight_format!r}): it writes "
                f"{' and '.join(map(repr, self.weight_formats))}"
            )
        if kwargs.get("distributed_checkpoint"):
            raise NotImplementedError(
                "save_pretrained(distributed_checkpoint=True) would write packed weights: use torch.distributed.checkpoint for "
                "training state, and save_pretrained(state_dict=full_state_dict) for the stock checkpoint"
            )
        self._weight_conversions = self._saved_conversions()
        directory = Path(save_directory)
        if directory.is_file():
            raise NotADirectoryError(f"cannot save to {directory}: it is a file, not a directory")
        with staged(directory, commit=is_main_process) as stage:
            self.weight_format = weight_format
            try:
                super().save_pretrained(stage, is_main_process=is_main_process, **_without_hub(kwargs))
            finally:
                self.weight_format = "stock"
            self.config.architectures = [self.stock_name]
            changes: dict[str, Any] = {"architectures": [self.stock_name]}
            if weight_format != "stock":
                changes["quantization_config"] = self.stored_quantization or {"quant_method": weight_format}
            _change_configuration(stage, changes)
        if push_to_hub and is_main_process:
            _upload(self, directory, kwargs)

    def _saved_conversions(self) -> list | None:
        """The conversions to undo: those that loading used, so that a checkpoint keeps its layout as with the stock class, and
        the family's packing in any case, which a model loaded from packed keys has not used. None (transformers' word for the
        family's whole mapping) for a model that was not loaded."""
        used = getattr(self, "_weight_conversions", None)
        if used is None:
            return None
        whole = get_model_conversion_mapping(self, add_legacy=False)
        known = {(conversion.scope_prefix, *conversion.target_patterns) for conversion in used}
        return used + [
            conversion
            for conversion in whole
            if isinstance(conversion, WeightConverter) and (conversion.scope_prefix, *conversion.target_patterns) not in known
        ]

    # -- the configuration, and who may not read it -----------------------------------------------------------------

    @property
    def config(self) -> PreTrainedConfig:
        """The stock configuration.

        `TrainingArguments(use_liger_kernel=True)` hands every model to Liger-Kernel's dispatcher, which goes by
        `config.model_type` and would patch the stock module and this instance. It alone gets no configuration, and then
        leaves the model as it is.
        """
        if not torch.compiler.is_compiling() and _asked_by_liger_kernel():
            logger.warning_once(
                f"use_liger_kernel has no effect on {type(self).__name__}: it is Liger-native already; nothing is patched."
            )
            return None  # type: ignore[return-value]
        return self._config

    @config.setter
    def config(self, value: PreTrainedConfig) -> None:
        self._config = value


def _asked_by_liger_kernel() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] == "liger_kernel"


def _refuse_loading(cls: type, kwargs: dict[str, Any]) -> None:
    sharding = [name for name in ("tp_plan", "tp_size", "distributed_config", "device_mesh") if kwargs.get(name) is not None]
    if sharding:
        raise NotImplementedError(
            f"{cls.__name__}.from_pretrained({', '.join(sharding)}=...): transformers would cut each checkpoint tensor before "
            f"it is packed, and q/k/v and gate/up would end up on the wrong ranks. Load without it, then shard with "
            f"torch.distributed.fsdp.fully_shard or through Accelerate's FSDP plugin."
        )
    if kwargs.get("gguf_file") is not None:
        raise NotImplementedError(
            f"{cls.__name__}.from_pretrained(gguf_file=...): GGUF's names and row order do not chain with packing. Load the "
            f"file with the stock class and GgufConfig(dequantize=True), save_pretrained it, and load that directory."
        )
    quantization = kwargs.get("quantization_config")
    if quantization is not None and not getattr(quantization, "dequantize", False):
        raise NotImplementedError(
            f"{cls.__name__}.from_pretrained(quantization_config={type(quantization).__name__}): quantised packed projections "
            f"are not supported. Load in bfloat16, or use the stock class for a quantised base model."
        )


def _checked_configuration(cls: type[LigerPreTrainedModel], source: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The stored configuration. Refuses another architecture's checkpoint, whose keys may be the same and its mathematics not,
    and weights in a format that the class does not read."""
    if source is None:  # from_pretrained(None, config=..., state_dict=...)
        return {}
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        stored = {"model_type": config.model_type, "quantization_config": getattr(config, "quantization_config", None)}
    else:
        options = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        stored = PreTrainedConfig.get_config_dict(config if config is not None else source, **options)[0]
    found, expected = stored.get("model_type"), cls.config_class.model_type
    if found is not None and found != expected:
        raise CheckpointError(
            f"{source} holds a model of type {found!r}, and {cls.__name__} reads {expected!r}: use the class of that family"
        )
    quantization = stored.get("quantization_config")
    if quantization is not None:
        stored = {**stored, "quantization_config": _as_dict(quantization)}
        method = stored["quantization_config"].get("quant_method")
        if method not in cls.weight_formats:
            raise NotImplementedError(
                f"{source} holds weights quantised with {method!r}, which {cls.__name__} does not read: load it with the stock "
                f"class, dequantise it, save_pretrained it, and load that directory"
            )
    return stored


def _as_dict(quantization: Any) -> dict[str, Any]:
    return dict(quantization) if isinstance(quantization, dict) else quantization.to_dict()


def _without_quantization(cls: type[LigerPreTrainedModel], source: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of from_pretrained, with a configuration that does not speak of quantised weights: transformers would
    replace modules by quantised ones, and the family's mapping dequantises by itself."""
    config = kwargs.pop("config", None)
    if isinstance(config, PreTrainedConfig):
        config = copy.deepcopy(config)
    else:
        hub = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        # A configuration would take it as its own, "auto" too.
        dtype = {name: kwargs.pop(name) for name in ("dtype", "torch_dtype") if name in kwargs}
        place = source if config is None else config
        config, kwargs = cls.config_class.from_pretrained(place, return_unused_kwargs=True, **kwargs)
        kwargs = {**hub, **dtype, **kwargs}
    del config.quantization_config
    return {**kwargs, "config": config}


@contextmanager
def _one_weight_at_a_time() -> Iterator[None]:
    """transformers reads files ahead of the conversion, in other threads and without a bound: quantised tensors, which are
    quick to read and slow to dequantise, would pile up in memory. Its switch for that is an environment variable."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _last_line(conversion_error: str) -> str:
    """The message in one of transformers' conversion errors, which are a traceback, the message, and a note."""
    return conversion_error.rpartition("\nError")[0].strip().rpartition("\n")[2]


def _report(cls: type, source: Any, problems: list[str]) -> str:
    shown, more = problems[:20], len(problems) - 20
    lines = "\n  ".join([*shown, f"... and {more} more"] if more > 0 else shown)
    return f"{source} does not fit {cls.__name__}; nothing was loaded:\n  {lines}"


# A weight file or its index, and the shards that a save with other shard sizes leaves behind.
_WEIGHT_FILE = re.compile(r"(pytorch_)?model(\.[^/]*)?(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


@contextmanager
def staged(directory: Path, *, commit: bool) -> Iterator[Path]:
    """A temporary directory whose files move to `directory` once the block has ended without an error."""
    existed = directory.exists()
    parent = directory if existed else directory.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=parent))
    try:
        yield stage
        if commit:
            _move(stage, directory)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _move(stage: Path, directory: Path) -> None:
    written = sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())
    if not directory.exists():
        os.chmod(stage, 0o777 & ~_umask())
        stage.rename(directory)
        return
    # Weights before what points at them, so that a reader never finds an index without its files.
    for name in sorted(written, key=lambda name: name.endswith(".json")):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / name, directory / name)
    if any(_WEIGHT_FILE.fullmatch(name) for name in written):
        for path in directory.iterdir():
            if path.is_file() and path.name not in written and _WEIGHT_FILE.fullmatch(path.name):
                path.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _change_configuration(stage: Path, changes: dict[str, Any]) -> None:
    path = stage / "config.json"
    if path.exists():
        config = json.loads(path.read_text(encoding="utf-8")) | changes
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


_HUB_ARGUMENTS = ("repo_id", "commit_message", "create_pr", "private", "repo_type", "exist_ok")


def _without_hub(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _HUB_ARGUMENTS}


def _upload(model: LigerPreTrainedModel, directory: Path, kwargs: dict[str, Any]) -> None:
    """Upload the saved directory, as save_pretrained(push_to_hub=True) of the stock class does."""
    from huggingface_hub import HfApi

    api = HfApi(token=kwargs.get("token"))
    repository = api.create_repo(kwargs.get("repo_id", directory.name), private=kwargs.get("private"), exist_ok=True).repo_id
    api.upload_folder(
        repo_id=repository,
        folder_path=directory,
        commit_message=kwargs.get("commit_message", f"Upload {model.stock_name}"),
        create_pr=kwargs.get("create_pr", False),
    )
