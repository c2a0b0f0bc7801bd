"""The gated multilayer perceptron."""

from collections.abc import Callable

from torch import Tensor, nn

from liger_models import ops
from liger_models.layers.linear import PackedLinear, attach_parts, runs_packed
from liger_models.layers.plain import is_plain

# The activations that the kernel set fuses, by the names that stock configurations use.
FUSED_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


class _GatedMLP(nn.Module):
    """What both layouts share: the fused op where nothing has been put around a projection, the composed path otherwise.

    Args:
        hidden_size: width of input and output.
        intermediate_size: width of gate and up.
        activation: the activation as a module or function.
        fused_activation: its name in the kernel set ("silu", "gelu", "gelu_tanh"), or None if it has none.
        bias: whether the projections have biases.
    """

    gate_up_proj: nn.Module

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Callable[[Tensor], Tensor],
        fused_activation: str | None,
        bias: bool = False,
    ):
        super().__init__()
        self._make_gate_and_up(hidden_size, intermediate_size, bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation, self.fused_activation = activation, fused_activation

    def forward(self, hidden_states: Tensor) -> Tensor:
        packed, down = self.gate_up_proj, self.down_proj
        if self.fused_activation is not None and is_plain(down, nn.Linear) and self._gate_and_up_are_plain():
            return ops.gated_mlp(hidden_states, packed.weight, down.weight, packed.bias, down.bias, self.fused_activation)
        return down(self._gated(*self._gate_and_up(hidden_states)))

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.fused_activation == "silu":
            return ops.swiglu(gate, up)
        if self.fused_activation is not None:
            return ops.geglu(gate, up, "tanh" if self.fused_activation == "gelu_tanh" else "none")
        return self.activation(gate) * up

    def _make_gate_and_up(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        raise NotImplementedError

    def _gate_and_up_are_plain(self) -> bool:
        raise NotImplementedError

    def _gate_and_up(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class LigerGatedMLP(_GatedMLP):
    """down(activation(gate(x)) * up(x)), with gate and up, which the checkpoint has apart, packed into `gate_up_proj`."""

    def _make_gate_and_up(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self.gate_up_proj = PackedLinear(hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias=bias)
        attach_parts(self, "gate_up_proj")

    def _gate_and_up_are_plain(self) -> bool:
        return is_plain(self.gate_up_proj, PackedLinear) and runs_packed(self, self.gate_up_proj)

    def _gate_and_up(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if runs_packed(self, self.gate_up_proj):
            gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
            return gate, up
        return self.gate_proj(hidden_states), self.up_proj(hidden_states)


class LigerJointGatedMLP(_GatedMLP):
    """down(activation(gate) * up) with (gate, up) = gate_up(x): one linear layer in the stock model and its checkpoint too."""

    def _make_gate_and_up(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)

    def _gate_and_up_are_plain(self) -> bool:
        return is_plain(self.gate_up_proj, nn.Linear)

    def _gate_and_up(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return gate, up
