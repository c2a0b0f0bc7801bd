"""Whether a module does what its class says and nothing more: the condition for computing it in a fused op.

A fused op reads a module's parameters and never calls the module. Whatever somebody put around it (LoRA, a hook, a
parametrisation, a quantised or sharded replacement) would be left out, so the composed path calls the modules instead.
"""

from torch import nn


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module is exactly of this class, without hooks and without a forward of its own."""
    return (
        type(module) is kind
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and not hasattr(module, "_hf_hook")  # accelerate replaces the instance's forward
    )
