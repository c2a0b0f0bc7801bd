"""SwiGLU in Triton: one kernel each way, the activation is recomputed in backward."""

import torch

from liger_models.kernels.backends.triton.activations import activate, activate_backward, refuses_dtype
from liger_models.kernels.swiglu import check_same_shape


def refuses(gate, up):
    return refuses_dtype(gate, up)


def forward(needs, gate, up):
    check_same_shape(gate, up)
    out = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
    activate(gate, up, out, "silu")
    return out, ()


def backward(needs, gradients, *, gate, up):
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if needs.gate else None
    dup = torch.empty(up.shape, dtype=up.dtype, device=up.device) if needs.up else None
    activate_backward(gradients[0], gate, up, dgate, dup, None, "silu")
    return dgate, dup
