"""The kernel set as functions: each op runs on the implementation resolved for the device of its first tensor.

    ops.rms_norm(x, weight, eps)
    ops.resolve("cuda").describe()
    with ops.use_backend("torch"): ...

`liger_models.kernels.<op>` holds each op's contract and torch reference.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

import torch

from liger_models.kernels import registry
from liger_models.kernels.registry import (
    VENDOR_REGISTRY,
    Contract,
    KernelSet,
    KernelUnavailableError,
    VendorInfo,
    get_vendor_for_device,
    infer_device,
    register_vendor,
    resolve,
    use_backend,
)

if TYPE_CHECKING:
    from liger_models.kernels.attention import attention
    from liger_models.kernels.cross_entropy import cross_entropy
    from liger_models.kernels.embedding import embedding
    from liger_models.kernels.fused_add_rms_norm import fused_add_rms_norm
    from liger_models.kernels.fused_linear_cross_entropy import fused_linear_cross_entropy
    from liger_models.kernels.fused_moe import fused_moe
    from liger_models.kernels.gated_mlp import gated_mlp
    from liger_models.kernels.geglu import geglu
    from liger_models.kernels.qk_norm_rope import qk_norm_rope
    from liger_models.kernels.qkv_rope import qkv_rope
    from liger_models.kernels.rms_norm import rms_norm
    from liger_models.kernels.rope import rope
    from liger_models.kernels.swiglu import swiglu


def _resolved(contract: Contract) -> Callable:
    name, arguments_of, functions_for = contract.name, contract.arguments, registry.functions_for
    autocast = tuple(contract.names.index(argument) for argument in contract.autocast)

    @wraps(contract.reference)
    def op(*args, **kwargs):
        arguments = arguments_of(args, kwargs)
        device = arguments[0].device
        if autocast and torch.is_autocast_enabled(device.type):
            arguments = _autocast(arguments, autocast, torch.get_autocast_dtype(device.type))
        return functions_for(device)[name](*arguments)

    op.__module__ = __name__
    # Each its own: torch.compile limits recompilations per code object.
    op.__code__ = op.__code__.replace(co_name=name)  # type: ignore[attr-defined]
    return op


def _autocast(arguments: tuple, positions: tuple[int, ...], dtype: torch.dtype) -> tuple:
    cast = list(arguments)
    for position in positions:
        if cast[position] is not None and cast[position].dtype != torch.float64:  # torch's linear layer leaves fp64 too
            cast[position] = cast[position].to(dtype)
    return tuple(cast)


globals().update({name: _resolved(contract) for name, contract in registry.contracts().items()})

__all__ = [
    "VENDOR_REGISTRY",
    "KernelSet",
    "KernelUnavailableError",
    "VendorInfo",
    "get_vendor_for_device",
    "infer_device",
    "register_vendor",
    "resolve",
    "use_backend",
    *registry.contracts(),
]
