"""The kernel set as functions: each op runs on the implementation resolved for the device of its first tensor.

    ops.rms_norm(x, weight, eps)
    ops.resolve("cuda").describe()
    with ops.use_backend("torch"): ...

`liger_models.kernels.<op>` holds each op's contract and torch reference.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

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
    from liger_models.kernels.rms_norm import rms_norm


def _resolved(contract: Contract) -> Callable:
    name, arguments_of = contract.name, contract.arguments

    @wraps(contract.reference)
    def op(*args, **kwargs):
        arguments = arguments_of(args, kwargs)
        return resolve(arguments[0].device).functions[name](*arguments)

    op.__module__ = __name__
    return op


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
