"""What every decoder shares: embeddings, the loop over blocks, the final norm, and the heads with their fused loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from liger_models.attention import KeyIntervals
from liger_models.compat import CACHE, named_cache, takes_cache, update_cache
from liger_models.layers.attention import eager_attention
from liger_models.layers.head import head_loss, softcapped
from liger_models.pretrained import LigerPreTrainedModel


class LigerRotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary positions, [batch or 1, sequence, rotary_dim] in fp32 whatever the model's dtype.

    The one module that holds a configuration: transformers' functions for scaled rope types (linear, dynamic, yarn, llama3,
    longrope) take it, at construction and, for those whose frequencies depend on the length, in the forward.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        functions = {"default": self.compute_default_rope_parameters, **ROPE_INIT_FUNCTIONS}
        frequencies, self.attention_scaling = functions[self.rope_type](config)
        # The names by which transformers finds these buffers: it computes them anew after loading from the meta device.
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("original_inv_freq", frequencies.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: PreTrainedConfig, *_: Any, **__: Any) -> tuple[Tensor, float]:
        """Unscaled inverse frequencies [rotary_dim / 2] (Su et al. 2021, arXiv:2104.09864) and the attention factor 1."""
        head_dim = head_dim_of(config)
        return _inverse_frequencies(config.rope_parameters["rope_theta"], head_dim), 1.0

    def _apply(self, function, recurse=True):
        # model.to(torch.bfloat16) must not round the frequencies: at position 32768 that turns the angle by whole turns.
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(function, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(hidden_states.device)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


class LigerPartialRotaryEmbedding(LigerRotaryEmbedding):
    """Rotary positions of the first `partial_rotary_factor * head_dim` elements of a head."""

    @staticmethod
    def compute_default_rope_parameters(config: PreTrainedConfig, *_: Any, **__: Any) -> tuple[Tensor, float]:
        """Unscaled inverse frequencies [rotary_dim / 2] and the attention factor 1."""
        head_dim = head_dim_of(config)
        rotary_dim = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        return _inverse_frequencies(config.rope_parameters["rope_theta"], rotary_dim), 1.0


def head_dim_of(config: PreTrainedConfig) -> int:
    """The width of a head: what the configuration says, or hidden_size split evenly where it says nothing."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _inverse_frequencies(theta: float, rotary_dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim)


_MASK_FUNCTIONS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class LigerDecoderModel(LigerPreTrainedModel):
    """A stack of blocks between embeddings and a final norm. A family's class builds the modules; this class runs them."""

    base_model_prefix = "model"
    _skip_keys_device_placement: ClassVar[list[str]] = [CACHE]
    unused_keys = frozenset({"lm_head.weight", "score.weight"})

    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    rotary_emb: nn.Module
    #: For each block the kind of mask and rotation it gets: "full_attention", "sliding_attention".
    layer_types: Sequence[str]
    output_class: ClassVar[type[ModelOutput]] = BaseModelOutputWithPast

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.layer_types = ("full_attention",) * config.num_hidden_layers
        #: For a kind of layer, further arguments of transformers' function that makes its mask.
        self.mask_options: dict[str, dict[str, Any]] = {}

    def post_init(self) -> None:
        super().post_init()
        for block in self.layers:
            block.self_attn.config = self.config  # transformers' attention functions look for it there

    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the last block after the final norm. Arguments and outputs as in the stock model.

        Args:
            input_ids: [batch, sequence] token ids, or None with inputs_embeds.
            attention_mask: [batch, keys] (1 for tokens to attend to), a 4-D mask, a mask for each kind of layer, or None.
            position_ids: [batch or 1, sequence]; several documents in one row begin at 0 each and do not see one another.
            cache: key-value cache; without one and with use_cache a new one is made.
            inputs_embeds: [batch, sequence, hidden] in place of input_ids.
            use_cache: default: the configuration's in evaluation, False in training.

        Raises:
            ValueError: neither or both of input_ids and inputs_embeds.
        """
        if use_cache is None and self.training:
            use_cache = False  # nobody reads it, and transformers detects packed documents only without a cache
        return self._decode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    @merge_with_config_defaults
    @capture_outputs
    def _decode(self, input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, **kwargs):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        masks = self._masks(hidden_states, attention_mask, position_ids, cache)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        rotations = self._rotations(hidden_states, _positions(hidden_states, position_ids, cache))
        context = {
            "attention_function": ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention),
            "position_ids": position_ids,
            "use_cache": use_cache,
            "update_cache": update_cache,
            **named_cache(cache),
            **kwargs,
        }
        for block, kind in zip(self.layers, self.layer_types):
            hidden_states = block(hidden_states, attention_mask=masks[kind], position_embeddings=rotations[kind], **context)
        return self.output_class(last_hidden_state=self.norm(hidden_states), **named_cache(cache))

    def _rotations(self, hidden_states: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """For each kind of layer the cosines and sines of the positions."""
        return dict.fromkeys(self.layer_types, self.rotary_emb(hidden_states, positions))

    def _masks(self, hidden_states: Tensor, attention_mask: Any, position_ids: Tensor | None, cache: Any) -> dict[str, Any]:
        """For each kind of layer its mask, in the form that the attention function takes. Positions are passed on only if the
        caller gave them: looking for document boundaries in them waits for the device."""
        if isinstance(attention_mask, dict):
            return attention_mask
        if isinstance(attention_mask, KeyIntervals):
            return dict.fromkeys(self.layer_types, attention_mask)
        plain = attention_mask is None and position_ids is None and cache is None
        return {
            kind: None
            if plain and self._attends_causally_unmasked(kind, hidden_states.shape[1])
            else _MASK_FUNCTIONS[kind](
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **self.mask_options.get(kind, {}),
                **named_cache(cache),
            )
            for kind in dict.fromkeys(self.layer_types)
        }

    def _attends_causally_unmasked(self, kind: str, length: int) -> bool:
        """Whether the attention function is causal by itself, and no window is shorter than the sequence. transformers leaves
        the mask out then, but not while it is traced: a compiled model would run the masked attention, which takes three
        times as long."""
        if self.config._attn_implementation != "sdpa" or not getattr(self.config, "is_causal", True) or self.mask_options:
            return False
        return kind == "full_attention" or length <= self.config.sliding_window


def _positions(hidden_states: Tensor, position_ids: Tensor | None, cache: Any) -> Tensor:
    if position_ids is not None:
        return position_ids
    seen = cache.get_seq_length() if cache is not None else 0
    return (torch.arange(hidden_states.shape[1], device=hidden_states.device) + seen).unsqueeze(0)


@dataclass
class LigerCausalLMOutput(CausalLMOutputWithPast):
    """The stock output, and what the fused loss can tell in passing.

    Attributes:
        token_accuracy: [] share of the tokens in the loss that the logits' argmax hits, if asked for.
        predicted_tokens: [batch, sequence] that argmax, -100 where the loss ignores the position, if asked for.
    """

    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class LigerLanguageModelHead:
    """What follows the hidden states of every model with a language-modelling head: logits, loss, or both.

    In training the loss is computed without the logits. The class that has this one as a base has `lm_head`.
    """

    #: Bytes that the logits of one chunk may take in the fused loss; None for its default.
    loss_memory_budget: int | None = None
    #: dtype in which the fused loss sums the head's gradient over chunks; None for the head's own.
    loss_accumulation_dtype: torch.dtype | None = None
    #: Soft cap of the logits, cap * tanh(logits / cap); None for no cap.
    logit_softcap: float | None = None

    def _head_outputs(
        self,
        outputs: Any,
        *,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = -100,
        skip_logits: bool | None = None,
        return_logits: bool | None = None,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> LigerCausalLMOutput:
        """The head's output for the base model's, with the arguments of LigerDecoderForCausalLM's forward."""
        hidden_states = keep_positions(outputs.last_hidden_state, logits_to_keep)
        targets = _targets(labels, shift_labels, ignore_index)
        if targets is not None and targets.shape[1] == outputs.last_hidden_state.shape[1]:
            targets = keep_positions(targets, logits_to_keep)  # else the caller gave labels for the kept positions only
        if return_logits is None:
            return_logits = not (self.training and targets is not None) if skip_logits is None else not skip_logits
        logits = self._logits(hidden_states) if return_logits else None
        loss, accuracy, predicted = None, None, None
        if targets is not None and hasattr(self, "_loss_function"):
            loss = self._given_loss(hidden_states, logits, labels, shift_labels, num_items_in_batch)
        elif targets is not None:
            loss, accuracy, predicted = head_loss(
                self.lm_head,
                hidden_states,
                logits,
                targets,
                num_items=num_items_in_batch,
                ignore_index=ignore_index,
                softcap=self.logit_softcap,
                memory_budget=self.loss_memory_budget,
                accumulation_dtype=self.loss_accumulation_dtype,
                return_token_accuracy=return_token_accuracy,
                return_predicted_tokens=return_predicted_tokens,
            )
        return LigerCausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            token_accuracy=accuracy,
            predicted_tokens=predicted,
            **named_cache(outputs.get(CACHE)),
        )

    def _logits(self, hidden_states: Tensor) -> Tensor:
        return softcapped(self.lm_head(hidden_states), self.logit_softcap)

    def _given_loss(
        self,
        hidden_states: Tensor,
        logits: Tensor | None,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        num_items_in_batch: int | Tensor | None,
    ) -> Tensor:
        """The loss by the function that the user assigned to `model.loss_function`, called as the stock class calls it."""
        given = {"shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        return self.loss_function(
            logits=self._logits(hidden_states) if logits is None else logits,
            labels=labels,
            vocab_size=self.config.get_text_config().vocab_size,
            **{name: value for name, value in given.items() if value is not None},
        )


class LigerDecoderForCausalLM(LigerPreTrainedModel, LigerLanguageModelHead, GenerationMixin):
    """A decoder with a language-modelling head. In training the loss is computed without the logits."""

    base_model_prefix = "model"
    _skip_keys_device_placement: ClassVar[list[str]] = [CACHE]
    model_class: ClassVar[type[LigerDecoderModel]]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = -100,
        skip_logits: bool | None = None,
        return_logits: bool | None = None,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        **kwargs: Any,
    ) -> LigerCausalLMOutput:
        """Logits, loss, or both.

        Arguments and outputs as in the stock class, and:

        Args:
            labels: [batch, sequence]; the logits at a position are held against the label of the next.
            shift_labels: [batch, sequence]; held against the logits at the same position. Wins over `labels`. (Not in the
                signature: transformers' Trainer would take it for a label that every batch must have.)
            num_items_in_batch: divides the summed loss in place of the number of labels that count.
            logits_to_keep: which positions get logits, and count in the loss: the last n, or an index or mask tensor.
            skip_logits, return_logits: whether `logits` is None. Default: only in training with labels.
            return_token_accuracy, return_predicted_tokens: fill in the fields of these names.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **named_cache(cache),
            **self._base_options(kwargs),
        )
        output = self._head_outputs(
            outputs,
            labels=labels,
            shift_labels=shift_labels,
            logits_to_keep=logits_to_keep,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            skip_logits=skip_logits,
            return_logits=return_logits,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
        return self._complete(output, outputs, attention_mask)

    def _base_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The base model's further arguments, of the caller's."""
        return options

    def _complete(self, output: LigerCausalLMOutput, outputs: ModelOutput, attention_mask: Any) -> ModelOutput:
        """The head's output with what a family adds from the base model's."""
        return output


class LigerDecoderForSequenceClassification(GenericForSequenceClassification, LigerPreTrainedModel):
    """A decoder with a classification head on the last token that is not padding."""

    base_model_prefix = "model"
    _skip_keys_device_placement: ClassVar[list[str]] = [CACHE]
    model_class: ClassVar[type[LigerDecoderModel]]
    new_keys = frozenset({"score.weight"})
    unused_keys = frozenset({"lm_head.weight"})

    def __init__(self, config: PreTrainedConfig):
        # Not the generic class's own: it asks AutoModel for the base model, and gets the stock one.
        LigerPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


def keep_positions(tensor: Tensor, positions: int | Tensor) -> Tensor:
    """The positions of a [batch, sequence, ...] tensor that `logits_to_keep` names.

    Args:
        positions: the last n (0 for all); a 1-D tensor of positions for every row; a 2-D tensor of positions, a row each; or
            a 2-D boolean mask, whose positions come back as one flat row.
    """
    if isinstance(positions, int):
        return tensor[:, -positions:] if positions else tensor
    if positions.dim() < 2:
        return tensor[:, positions]
    if positions.dtype == torch.bool:
        return tensor[positions].unsqueeze(0)
    rows = torch.arange(tensor.shape[0], device=positions.device).unsqueeze(1)
    return tensor[rows, positions]


def _targets(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor | None:
    """For each position the token that follows it; [batch, sequence]."""
    if shift_labels is not None or labels is None:
        return shift_labels
    return nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
