"""The gated MLP: matrix products by torch, and one Triton kernel between them each way.

Backward holds at most five buffers of [rows, intermediate]: the kept projection (two), its gradient (two), and one that is
first the gradient of the activation's value and then that value itself, recomputed in place.
"""

import math

import torch
from torch import Tensor

from liger_models.kernels.backends.triton.activations import activate, activate_backward, refuses_dtype
from liger_models.kernels.gated_mlp import check_arguments


def refuses(x, gate_up_weight, down_weight, gate_up_bias, down_bias, activation):
    return refuses_dtype(x, gate_up_weight, down_weight)


def forward(needs, x, gate_up_weight, down_weight, gate_up_bias, down_bias, activation):
    check_arguments(gate_up_weight, down_weight, activation)
    gate_up = _linear(_rows(x), gate_up_weight, gate_up_bias)
    h = _activated(gate_up, activation)
    if not any(needs):
        gate_up = None  # nobody will ask for it: free before the second product
    y = _linear(h, down_weight, down_bias)
    return y.view(*x.shape[:-1], y.shape[1]), (gate_up,)


def backward(needs, gradients, *, x, gate_up_weight, down_weight, activation, gate_up):
    dy = _rows(gradients[0])
    d_gate_up, h = _through_activation(needs, dy, down_weight, gate_up, activation)
    d_down_weight = torch.mm(dy.t(), h) if needs.down_weight else None
    del h
    d_down_bias = _column_sum(dy) if needs.down_bias else None
    d_gate_up_bias = _column_sum(d_gate_up) if needs.gate_up_bias else None
    d_gate_up_weight = torch.mm(d_gate_up.t(), _rows(x)) if needs.gate_up_weight else None
    dx = torch.mm(d_gate_up, gate_up_weight).view(x.shape) if needs.x else None
    return dx, d_gate_up_weight, d_down_weight, d_gate_up_bias, d_down_bias


def _through_activation(needs, dy: Tensor, down_weight: Tensor, gate_up: Tensor, activation: str):
    """The gradient of the packed projection and the recomputed value of the activation, each only if something needs it."""
    if not (needs.x or needs.gate_up_weight or needs.gate_up_bias):
        return None, _activated(gate_up, activation) if needs.down_weight else None
    d_h = torch.mm(dy, down_weight)
    h = d_h if needs.down_weight else None
    d_gate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    activate_backward(d_h, *gate_up.chunk(2, dim=1), *d_gate_up.chunk(2, dim=1), h, activation)
    return d_gate_up, h


def _activated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    activate(gate, up, h, activation)
    return h


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())


def _column_sum(rows: Tensor) -> Tensor:
    return rows.sum(0, dtype=torch.float32).to(rows.dtype)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
