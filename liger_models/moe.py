"""What decoders with a mixture of experts add: the routers' logits, and the loss that balances the experts' load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

from liger_models.compat import CACHE, named_cache
from liger_models.decoder import LigerCausalLMOutput, LigerDecoderForCausalLM, LigerDecoderModel
from liger_models.layers.moe import load_balancing_loss


class LigerMoeDecoderModel(LigerDecoderModel):
    """A decoder some of whose blocks have routed experts. With `output_router_logits` its output has `router_logits`: for each
    of these blocks [batch * sequence, experts]."""

    output_class = MoeModelOutputWithPast


@dataclass
class LigerMoeCausalLMOutput(MoeCausalLMOutputWithPast):
    """The stock output, and LigerCausalLMOutput's fields."""

    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class LigerMoeDecoderForCausalLM(LigerDecoderForCausalLM):
    """A decoder with routed experts and a language-modelling head.

    `forward` takes `output_router_logits` too (default: the configuration's). With it the output has `router_logits` and
    `aux_loss`, the loss that balances the experts' load, and `loss` includes it times `router_aux_loss_coef`.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts, self.num_experts_per_tok = config.num_local_experts, config.num_experts_per_tok

    def _base_options(self, options: dict[str, Any]) -> dict[str, Any]:
        asked = options.get("output_router_logits")
        return {**options, "output_router_logits": self.config.output_router_logits if asked is None else asked}

    def _complete(self, output: LigerCausalLMOutput, outputs: Any, attention_mask: Any) -> LigerMoeCausalLMOutput:
        router_logits, aux_loss, loss = outputs.router_logits or None, None, output.loss
        if router_logits is not None:
            aux_loss = load_balancing_loss(router_logits, self.num_experts_per_tok, _padding(attention_mask, outputs))
            if loss is not None:
                loss = loss + self.router_aux_loss_coef * aux_loss.to(loss.device)
        return LigerMoeCausalLMOutput(
            loss=loss,
            aux_loss=aux_loss,
            logits=output.logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            router_logits=outputs.router_logits,
            token_accuracy=output.token_accuracy,
            predicted_tokens=output.predicted_tokens,
            **named_cache(output.get(CACHE)),
        )


def _padding(attention_mask: Any, outputs: Any) -> Tensor | None:
    """Which of the tokens that went through the routers are no padding, [batch, sequence]; None if the mask does not say."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return None
    return attention_mask[:, -outputs.last_hidden_state.shape[1] :]  # a mask covers the cache too
