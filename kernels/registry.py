"""The kernel set: one contract per op, several implementations, resolved once per device type.

An op is a module `kernels/<op>.py` that declares a function of the same name with `@contract`. The function's signature and
docstring are the contract; its body is the torch reference, which autograd differentiates.

A backend is a package `kernels/backends/<backend>/`. It implements an op by a module `<op>.py` with plain functions:

    forward(needs, *arguments) -> (outputs, saved)
        `arguments` in the contract's order. `needs` is a named tuple of booleans, one per differentiable argument. `outputs`
        is what the reference returns; `saved` is a tuple of new tensors for the backward.
    backward(needs, gradients, *, <names>) -> tuple of one gradient (or None) per differentiable argument
        `gradients` has one entry per output (None where the output took no part in the loss). The keyword names say what the
        backward keeps alive: names of contract arguments, names of contract outputs, and then, in the order in which forward
        returned them, names for the `saved` tensors. Nothing else is kept.
    refuses(*arguments) -> str | None        (optional)
        The reason why the backend cannot serve a call, or None.
    backward_again(...)                      (optional)
        As backward, for the second and later backwards of one forward (retain_graph=True). A pair that has it may overwrite
        and return `saved` tensors in its first backward.
    traced_backward(...)                     (optional)
        As backward, but plain torch operations that mutate nothing: torch.compile traces it where the opaque backward would
        be called. None for a call that it leaves to the opaque backward.

One autograd wrapper (`_bind`) turns such a pair into a differentiable function. Eagerly it is a plain autograd Function; under
torch.compile it is an opaque library op whose fake kernel is `forward` itself with its launches left out (see
`backends/triton/launch.py`), so both ways run the same code.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import pkgutil
import types
import typing
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

logger = logging.getLogger(__name__)

REFERENCE = "torch"
DEFAULT_BACKEND = "triton"
ENTRY_POINTS = "liger_models.vendors"
_PACKAGE = __name__.rpartition(".")[0]
_BACKENDS = f"{_PACKAGE}.backends"


class KernelUnavailableError(RuntimeError):
    """A backend that the user named cannot serve an op. The message names the op, the backend and the reason."""


# ---------------------------------------------------------------------------------------------------------------------
# Contracts


@dataclass(frozen=True)
class Contract:
    """What every implementation of an op has to do: its signature, and the torch reference that defines its values."""

    name: str
    reference: Callable
    differentiable: tuple[str, ...]
    outputs: tuple[str, ...]
    autocast: tuple[str, ...]
    result: Callable[[tuple], Any]

    # Computed at declaration: a call may be traced, and an attribute that appears then fails torch.compile's guards.
    names: tuple[str, ...] = field(init=False)
    defaults: tuple[Any, ...] = field(init=False)
    annotations: dict[str, Any] = field(init=False)
    positions: tuple[int, ...] = field(init=False)  # of the differentiable arguments
    needs_type: type = field(init=False)

    def __post_init__(self):
        parameters = inspect.signature(self.reference).parameters.values()
        names = tuple(parameter.name for parameter in parameters)
        derived = {
            "names": names,
            "defaults": tuple(parameter.default for parameter in parameters),
            "annotations": typing.get_type_hints(self.reference),
            "positions": tuple(names.index(name) for name in self.differentiable),
            "needs_type": namedtuple(f"{self.name}_needs", self.differentiable),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def arguments(self, args: tuple, kwargs: dict) -> tuple:
        """All arguments in order, defaults filled in. Raises TypeError as a plain call of the reference would."""
        given, defaults = len(args), self.defaults
        if kwargs or given > len(defaults) or (given < len(defaults) and defaults[given] is inspect.Parameter.empty):
            return self._bind(args, kwargs)
        return args + defaults[given:]

    def _bind(self, args: tuple, kwargs: dict) -> tuple:
        rest = []
        for name, default in zip(self.names[len(args) :], self.defaults[len(args) :]):
            value = kwargs.pop(name, default)
            if value is inspect.Parameter.empty:
                raise TypeError(f"{self.name}() misses its argument {name!r}; it takes {', '.join(self.names)}")
            rest.append(value)
        if kwargs or len(args) > len(self.names):
            extra = ", ".join(map(repr, kwargs)) or f"{len(args)} positional arguments"
            raise TypeError(f"{self.name}() does not take {extra}; it takes {', '.join(self.names)}")
        return (*args, *rest)


_CONTRACTS: dict[str, Contract] = {}


def _single_or_tuple(outputs: tuple) -> Any:
    return outputs[0] if len(outputs) == 1 else outputs


def contract(
    *,
    differentiable: tuple[str, ...],
    outputs: tuple[str, ...] = ("output",),
    autocast: tuple[str, ...] = (),
    result: Callable[[tuple], Any] = _single_or_tuple,
) -> Callable:
    """Declare the decorated function as an op's contract and torch reference. The function itself stays as it is.

    Args:
        differentiable: names of the tensor arguments that receive gradients.
        outputs: names of the tensors that an implementation's forward returns, in order (None for one not asked for).
        autocast: names of the tensor arguments that torch.autocast casts, as it casts those of a linear layer.
        result: makes what the caller sees from the tuple of outputs.
    """

    def declare(reference: Callable) -> Callable:
        name = reference.__name__
        _CONTRACTS[name] = Contract(name, reference, differentiable, outputs, autocast, result)
        return reference

    return declare


def contracts() -> dict[str, Contract]:
    """Every op's contract by name: one module of this folder each."""
    package = importlib.import_module(_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        if not module.ispkg and f"{_PACKAGE}.{module.name}" != __name__:
            importlib.import_module(f"{_PACKAGE}.{module.name}")
    return _CONTRACTS


# ---------------------------------------------------------------------------------------------------------------------
# Vendors


@dataclass(frozen=True)
class VendorInfo:
    """A vendor's backend and the device type that it serves before the default backend.

    Attributes:
        vendor: the backend's name; in this repository the sub-package is `backends/_<vendor>`.
        device: the torch device type that it serves ("cuda", "npu", "xpu", ...).
        package: import path of the package with the vendor's op modules. Imported only for a tensor on `device`.
    """

    vendor: str
    device: str
    package: str = ""


VENDOR_REGISTRY: dict[str, VendorInfo] = {}


def register_vendor(info: VendorInfo) -> None:
    """Register (or replace) the vendor that serves `info.device`."""
    VENDOR_REGISTRY[info.device] = info
    _forget_resolved()


def get_vendor_for_device(device: str) -> VendorInfo | None:
    """The vendor that overrides the default backend on this device type, or None."""
    return VENDOR_REGISTRY.get(device)


def infer_device() -> str:
    """The device type on which work runs here by default: the accelerator that torch finds, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"


# ---------------------------------------------------------------------------------------------------------------------
# Implementations and the one autograd wrapper


@dataclass(frozen=True)
class Implementation:
    """A backend's way to compute an op."""

    contract: Contract
    backend: str
    forward: Callable
    backward: Callable | None = None
    refuses: Callable | None = None
    backward_again: Callable | None = None
    traced_backward: Callable | None = None
    keeps: tuple[str, ...] = field(init=False)
    # For each name that backward keeps: (name, where it comes from, index there).
    plan: tuple[tuple[str, str, int], ...] = field(init=False)

    def __post_init__(self):
        names: tuple[str, ...] = ()
        if self.backward is not None:
            names = tuple(inspect.signature(self.backward).parameters)[2:]
        object.__setattr__(self, "keeps", names)
        object.__setattr__(self, "plan", self._plan())

    def _plan(self) -> tuple[tuple[str, str, int], ...]:
        plan, saved = [], 0
        for name in self.keeps:
            if name in self.contract.names:
                plan.append((name, "argument", self.contract.names.index(name)))
            elif name in self.contract.outputs:
                plan.append((name, "output", self.contract.outputs.index(name)))
            else:
                plan.append((name, "saved", saved))
                saved += 1
        return tuple(plan)

    def kept(self, arguments: tuple, outputs: tuple, saved: tuple) -> list:
        sources = {"argument": arguments, "output": outputs, "saved": saved}
        return [sources[source][index] for _, source, index in self.plan]

    def gradients(self, needs: tuple, gradients: tuple, kept: list, function: Callable | None = None) -> tuple | None:
        """Gradients in the order of the contract's arguments, None where an argument has none. `function` for `backward`."""
        function = function or self.backward
        assert function is not None
        computed = function(self.contract.needs_type(*needs), gradients, **dict(zip(self.keeps, kept)))
        if computed is None:
            return None
        result: list = [None] * len(self.contract.names)
        for position, gradient in zip(self.contract.positions, computed):
            result[position] = gradient
        return tuple(result)


def _as_tuple(outputs: Any) -> tuple:
    return tuple(outputs) if isinstance(outputs, tuple) else (outputs,)


class _Differentiable(torch.autograd.Function):
    """The autograd wrapper of every op and backend. `needs` is computed by the caller, under its own grad mode."""

    @staticmethod
    def forward(ctx, implementation: Implementation, needs: tuple, *arguments):
        outputs, saved = implementation.forward(needs, *arguments)
        all_outputs = _as_tuple(outputs)
        kept = implementation.kept(arguments, all_outputs, saved)
        ctx.save_for_backward(*(value for value in kept if isinstance(value, torch.Tensor)))
        ctx.constants = [None if isinstance(value, torch.Tensor) else (value,) for value in kept]
        ctx.implementation, ctx.needs, ctx.function = implementation, needs, implementation.backward
        ctx.mark_non_differentiable(
            *(o for o in all_outputs if o is not None and not (o.is_floating_point() or o.is_complex()))
        )
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        tensors = iter(ctx.saved_tensors)
        kept = [next(tensors) if constant is None else constant[0] for constant in ctx.constants]
        function, ctx.function = ctx.function, ctx.implementation.backward_again or ctx.function
        return None, None, *ctx.implementation.gradients(ctx.needs, gradients, kept, function)


def _bind(implementation: Implementation, fallback: Callable | None) -> Callable:
    """The function of the kernel set for one implementation: all of the contract's arguments, in order, positionally.

    `fallback` serves the calls that the implementation refuses; without one a refusal raises KernelUnavailableError.
    """
    contract = implementation.contract
    opaque = _OpaqueOp(implementation)

    def kernel(*arguments):
        if implementation.refuses is not None:
            reason = implementation.refuses(*arguments)
            if reason is not None:
                return _refused(implementation, reason, fallback, arguments)
        grad_enabled = torch.is_grad_enabled()
        needs = contract.needs_type(
            *[
                grad_enabled and arguments[position] is not None and arguments[position].requires_grad
                for position in contract.positions
            ]
        )
        if torch.compiler.is_compiling():
            outputs = opaque(needs, arguments)
        elif True in needs:
            outputs = _Differentiable.apply(implementation, needs, *arguments)
        else:
            outputs = implementation.forward(needs, *arguments)[0]
        return contract.result(_as_tuple(outputs))

    kernel.__name__ = kernel.__qualname__ = f"{contract.name}[{implementation.backend}]"
    return kernel


_logged: set[tuple[str, str, str]] = set()


def _log_once(op: str, backend: str, reason: str) -> None:
    if (op, backend, reason) not in _logged:
        _logged.add((op, backend, reason))
        logger.warning("%s runs on the torch reference: backend %r cannot serve it (%s)", op, backend, reason)


def _refused(implementation: Implementation, reason: str, fallback: Callable | None, arguments: tuple):
    if fallback is None:
        raise KernelUnavailableError(
            f"{implementation.contract.name}: backend {implementation.backend!r} cannot serve this call: {reason}. "
            f"Choose another backend (LIGER_BACKEND, ops.use_backend) or leave the choice to the package."
        )
    if not torch.compiler.is_compiling():
        _log_once(implementation.contract.name, implementation.backend, reason)
    return fallback(*arguments)


# ---------------------------------------------------------------------------------------------------------------------
# The same pair as an opaque library op, for torch.compile

_SCHEMA_TYPES = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int: "int",
    int | None: "int?",
    bool: "bool",
    str: "str",
    torch.dtype | None: "ScalarType?",
}


def _pack(tensors) -> list[torch.Tensor]:
    """A library op returns distinct tensors only. What is none travels as an empty boolean tensor, which no op returns:
    None with the shape [0], a second mention of tensor k (one gradient for two arguments) with the shape [0, k]."""
    device = next((t.device for t in tensors if t is not None), None)
    first = {id(t): index for index, t in reversed(list(enumerate(tensors)))}
    return [
        torch.empty(0, dtype=torch.bool, device=device)
        if t is None
        else t
        if first[id(t)] == index
        else torch.empty(0, first[id(t)], dtype=torch.bool, device=device)
        for index, t in enumerate(tensors)
    ]


def _unpack(tensors) -> list[torch.Tensor | None]:
    return [
        t if t.dtype is not torch.bool or t.dim() == 0 or t.shape[0] else None if t.dim() == 1 else tensors[t.shape[1]]
        for t in tensors
    ]


class _OpaqueOp:
    """torch.ops.liger_models.<op>_<backend>: `forward` and `backward` of an implementation, opaque to the compiler."""

    _library = torch.library.Library("liger_models", "DEF")

    def __init__(self, implementation: Implementation):
        self.implementation = implementation
        self._op: Callable | None = None
        self._define()

    def __call__(self, needs: tuple, arguments: tuple):
        assert self._op is not None
        outputs = self._op(list(needs), *arguments)
        return tuple(_unpack(outputs[: len(self.implementation.contract.outputs)]))

    def _define(self) -> None:
        implementation, contract = self.implementation, self.implementation.contract
        name = f"{contract.name}_{implementation.backend.strip('_')}"
        types_ = [_SCHEMA_TYPES[contract.annotations[argument]] for argument in contract.names]
        schema = ", ".join(f"{type_} {argument}" for type_, argument in zip(types_, contract.names))
        if hasattr(torch.ops.liger_models, name):  # resolved before, under another choice of backends
            self._op = getattr(torch.ops.liger_models, name).default
            return
        self._library.define(f"{name}(bool[] needs, {schema}) -> Tensor[]")
        self._library.impl(name, self._forward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"liger_models::{name}", self._forward, lib=self._library)
        if implementation.backward is not None:
            self._define_backward(name, dict(zip(contract.names, types_)))
        self._op = getattr(torch.ops.liger_models, name).default

    def _forward(self, needs, *arguments):
        outputs, saved = self.implementation.forward(self.implementation.contract.needs_type(*needs), *arguments)
        return _pack((*_as_tuple(outputs), *saved))

    def _define_backward(self, name: str, argument_types: dict[str, str]) -> None:
        implementation, contract = self.implementation, self.implementation.contract
        kept_types = [argument_types.get(keep, "Tensor?") for keep in implementation.keeps]
        schema = ", ".join(f"{type_} kept_{keep}" for type_, keep in zip(kept_types, implementation.keeps))
        self._library.define(f"{name}_backward(bool[] needs, Tensor?[] gradients, {schema}) -> Tensor[]")
        self._library.impl(f"{name}_backward", self._backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"liger_models::{name}_backward", self._backward, lib=self._library)
        backward_op = getattr(torch.ops.liger_models, f"{name}_backward").default
        count = len(contract.outputs)

        def setup_context(ctx, inputs, output):
            needs, *arguments = inputs
            unpacked = _unpack(output)
            kept = implementation.kept(tuple(arguments), tuple(unpacked[:count]), tuple(unpacked[count:]))
            ctx.save_for_backward(*(value for value in kept if isinstance(value, torch.Tensor)))
            ctx.constants = [None if isinstance(value, torch.Tensor) else (value,) for value in kept]
            ctx.needs = needs
            ctx.set_materialize_grads(False)

        def backward(ctx, gradients):
            tensors = iter(ctx.saved_tensors)
            kept = [next(tensors) if constant is None else constant[0] for constant in ctx.constants]
            computed = None
            if implementation.traced_backward is not None:
                computed = implementation.gradients(ctx.needs, gradients[:count], kept, implementation.traced_backward)
            if computed is None:
                computed = _unpack(backward_op(list(ctx.needs), list(gradients[:count]), *kept))
            return None, *computed

        torch.library.register_autograd(f"liger_models::{name}", backward, setup_context=setup_context, lib=self._library)

    def _backward(self, needs, gradients, *kept):
        return _pack(self.implementation.gradients(tuple(needs), tuple(gradients), list(kept)))


# ---------------------------------------------------------------------------------------------------------------------
# Resolution


@dataclass(frozen=True)
class Choice:
    """Which implementation an op got on a device type, and why."""

    op: str
    backend: str
    reason: str


class KernelSet:
    """The ops as resolved for one device type: immutable, one attribute per op."""

    __slots__ = ("_functions", "choices", "device", "functions")
    device: str
    functions: types.MappingProxyType[str, Callable]
    choices: types.MappingProxyType[str, Choice]
    _functions: dict[str, Callable]

    def __init__(self, device: str, functions: dict[str, Callable], choices: dict[str, Choice]):
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "_functions", functions)
        object.__setattr__(self, "functions", types.MappingProxyType(functions))
        object.__setattr__(self, "choices", types.MappingProxyType(choices))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a KernelSet is immutable: cannot set {name!r}; use ops.use_backend to choose another backend")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a KernelSet is immutable: cannot delete {name!r}")

    def __getattr__(self, name: str) -> Callable:
        try:
            return self.functions[name]
        except KeyError:
            raise AttributeError(f"no op {name!r}; the kernel set has {', '.join(sorted(self.functions))}") from None

    def __dir__(self) -> list[str]:
        return sorted([*self.functions, "choices", "describe", "device", "functions"])

    def describe(self) -> str:
        """A line per op: its name, the backend that serves it on this device, and the reason."""
        width = max(map(len, self.choices))
        lines = [f"{c.op:<{width}}  {c.backend:<8}  {c.reason}" for c in self.choices.values()]
        return "\n".join([f"kernel set for {self.device}", *lines])


class _Traced:
    """Per device type and named backend, the functions that compiled graphs call."""


_TRACED = _Traced()
_RESOLVED: dict[tuple[str, str | None], KernelSet] = {}
# A process-wide choice, not a context variable: backward recomputes checkpointed layers on autograd's own threads.
_named_backend: str | None = os.environ.get("LIGER_BACKEND") or None


def _forget_resolved() -> None:
    _RESOLVED.clear()
    vars(_TRACED).clear()


def functions_for(device: torch.device) -> dict[str, Callable]:
    """The functions of `resolve(device)`: what an op's call looks itself up in.

    A plain dictionary, to be read only: torch.compile breaks the graph at a mapping proxy once any dictionary was changed.
    """
    if torch.compiler.is_compiling():
        return getattr(_TRACED, _resolved_while_tracing(device.type, _named_backend))
    kernel_set = _RESOLVED.get((device.type, _named_backend))
    return (kernel_set if kernel_set is not None else resolve(device))._functions


@torch.compiler.assume_constant_result
def _resolved_while_tracing(device_type: str, named: str | None) -> str:
    """The attribute of _TRACED with the functions for a device type.

    A compiled function may be the first to use a device, and resolution cannot be traced: it runs here, while the graph is
    made. The graph then reads an attribute, which it guards; a dictionary it would have seen as it was before.
    """
    key = f"{device_type}_{named}"
    setattr(_TRACED, key, resolve(device_type)._functions)
    return key


def resolve(device: str | torch.device) -> KernelSet:
    """The kernel set for a device type ("cuda", "cpu", ...) under the current choice of backend.

    Raises:
        KernelUnavailableError: the user named a backend (LIGER_BACKEND, use_backend) that cannot run on this device.
    """
    device_type = torch.device(device).type
    try:
        return _RESOLVED[device_type, _named_backend]
    except KeyError:
        return _RESOLVED.setdefault((device_type, _named_backend), _resolve(device_type, _named_backend))


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block every op runs on the backend of this name ("torch", "triton" or a vendor), in the whole process.

    Raises:
        KernelUnavailableError: at once, if there is no backend of this name; at an op's call, if it cannot serve the op.
    """
    global _named_backend
    _backend_package(name)
    previous, _named_backend = _named_backend, name
    try:
        yield
    finally:
        _named_backend = previous


def _backend_package(name: str) -> str | None:
    """Import path of a backend's package; None for the reference. Raises KernelUnavailableError for an unknown name."""
    if name == REFERENCE:
        return None
    for info in VENDOR_REGISTRY.values():
        if info.vendor == name:
            return info.package or f"{_BACKENDS}._{name}"
    package = f"{_BACKENDS}.{name}"
    if not name.isidentifier() or name.startswith("_") or importlib.util.find_spec(package) is None:
        known = sorted({REFERENCE, DEFAULT_BACKEND, *(info.vendor for info in VENDOR_REGISTRY.values())})
        raise KernelUnavailableError(f"no backend {name!r}; this installation has {', '.join(known)}")
    return package


def _resolve(device: str, named: str | None) -> KernelSet:
    functions, choices = {}, {}
    for name, contract in contracts().items():
        functions[name], choices[name] = _choose(contract, device, named)
    return KernelSet(device, functions, choices)


def _choose(contract: Contract, device: str, named: str | None) -> tuple[Callable, Choice]:
    reference = contract.reference
    if named == REFERENCE:
        return reference, Choice(contract.name, REFERENCE, "named by the user")
    if named is not None:
        found, reason = _implementation(contract, named, device)
        if found is None:
            return _unavailable(contract, named, reason), Choice(contract.name, "none", reason)
        return _bind(found, None), Choice(contract.name, named, "named by the user")
    reasons = []
    vendor = get_vendor_for_device(device)
    for backend in (*([vendor.vendor] if vendor else []), DEFAULT_BACKEND):
        found, reason = _implementation(contract, backend, device)
        if found is not None:
            return _bind(found, reference), Choice(contract.name, backend, f"first choice on {device}: {reason}")
        reasons.append(f"{backend}: {reason}")
    return reference, Choice(contract.name, REFERENCE, "; ".join(reasons))


def _unavailable(contract: Contract, backend: str, reason: str) -> Callable:
    def kernel(*_arguments):
        raise KernelUnavailableError(f"{contract.name}: backend {backend!r} is not available: {reason}")

    return kernel


def _implementation(contract: Contract, backend: str, device: str) -> tuple[Implementation | None, str]:
    """A backend's implementation of an op for a device type and why it is offered, or None and why not."""
    package = _backend_package(backend)
    assert package is not None
    serves = [info.device for info in VENDOR_REGISTRY.values() if info.vendor == backend]
    if serves and device not in serves:  # before its package is imported: the libraries it needs may not be here
        return None, f"it serves {', '.join(serves)}, not {device}"
    reason = importlib.import_module(package).unavailable(device)
    if reason is not None:
        return None, reason
    if importlib.util.find_spec(f"{package}.{contract.name}") is None:
        return None, "it does not implement this op"
    module = importlib.import_module(f"{package}.{contract.name}")
    implementation = Implementation(
        contract,
        backend,
        module.forward,
        *(getattr(module, name, None) for name in ("backward", "refuses", "backward_again", "traced_backward")),
    )
    return implementation, "implements the contract"


def _find_vendors() -> None:
    """Let every `backends/_<vendor>` sub-package and every entry point register its VendorInfo."""
    from importlib.metadata import entry_points

    backends = importlib.import_module(_BACKENDS)
    for module in pkgutil.iter_modules(backends.__path__):
        if module.name.startswith("_"):
            importlib.import_module(f"{_BACKENDS}.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


_find_vendors()
