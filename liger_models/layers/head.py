"""The language-modelling head's loss: from the logits if there are any, else without them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models import ops
from liger_models.layers.plain import is_plain


def head_loss(
    head: nn.Module,
    hidden_states: Tensor,
    logits: Tensor | None,
    targets: Tensor,
    *,
    num_items: int | Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    memory_budget: int | None = None,
    accumulation_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Cross-entropy of `head(hidden_states)` against `targets`.

    Something around the head (LoRA, a hook, another device) has its say only if the head is called: then the logits are
    formed once.

    Args:
        head: [hidden] -> [vocabulary], a linear layer or what somebody has put around one.
        hidden_states: [batch, sequence, hidden].
        logits: [batch, sequence, vocabulary] where they are there already, soft cap included.
        targets: [batch, sequence].
        num_items: divides the sum in place of the number of targets that count.
        softcap, memory_budget, accumulation_dtype, ...: as in `kernels/fused_linear_cross_entropy.py`.

    Returns:
        The loss, and token accuracy and predicted tokens if asked for.
    """
    if logits is None and not is_plain(head, nn.Linear):
        logits = softcapped(head(hidden_states), softcap)
    source = hidden_states if logits is None else logits
    targets = targets.to(source.device)
    shared = {
        "ignore_index": ignore_index,
        "divisor": _divisor(num_items, source.device),
        "return_token_accuracy": return_token_accuracy,
        "return_predicted_tokens": return_predicted_tokens,
    }
    if logits is not None:
        losses = ops.cross_entropy(logits, targets, **shared)
    else:
        losses = ops.fused_linear_cross_entropy(
            hidden_states,
            head.weight,
            targets,
            bias=head.bias,
            softcap=softcap,
            accumulation_dtype=accumulation_dtype,
            memory_budget=memory_budget,
            **shared,
        )
    if isinstance(losses, tuple):
        return losses.loss, losses.token_accuracy, losses.predicted_tokens
    return losses, None, None


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """cap * tanh(logits / cap), or the logits where there is no cap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _divisor(num_items: int | Tensor | None, device: torch.device) -> Tensor | None:
    if num_items is None:
        return None
    if isinstance(num_items, Tensor):
        return num_items.to(device=device, dtype=torch.float32, non_blocking=True).reshape(())
    return torch.full((), float(num_items), device=device)
