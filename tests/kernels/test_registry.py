"""The registry: resolution, choices of a backend, vendors, and what a call of an op costs."""

import inspect
import logging
import os
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from checks import assert_close, gradients

from liger_models import ops
from liger_models.kernels import registry
from liger_models.kernels.rms_norm import rms_norm

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing resolved, named, logged or registered before a test, nor left behind."""
    monkeypatch.setattr(registry, "_RESOLVED", {})
    monkeypatch.setattr(registry, "_named_backend", None)
    monkeypatch.setattr(registry, "_logged", set())
    monkeypatch.setattr(registry, "VENDOR_REGISTRY", {})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def interpreted(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU in this process, not interpreted")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def run(code: str, *path: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run Python code in a fresh process."""
    inherited = {n: v for n, v in os.environ.items() if n not in ("LIGER_BACKEND", "TRITON_INTERPRET")}
    search = os.pathsep.join(map(str, [*path, ROOT]))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True,
        env={**inherited, "PYTHONPATH": search, **environment}, cwd=path[0] if path else ROOT,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The kernel set


def test_one_attribute_per_op():
    kernel_set = ops.resolve("cpu")
    assert set(kernel_set.functions) == set(registry.contracts())
    assert "rms_norm" in dir(kernel_set)
    x, weight = torch.randn(2, 3, 8)[0], torch.randn(8)
    assert kernel_set.rms_norm(x, weight, 1e-6, 0.0, False).equal(rms_norm(x, weight))
    with pytest.raises(AttributeError, match=r"no op 'softmax'; the kernel set has .*rms_norm"):
        _ = kernel_set.softmax


def test_kernel_set_is_immutable():
    kernel_set = ops.resolve("cpu")
    with pytest.raises(AttributeError, match=r"immutable.*'rms_norm'.*use_backend"):
        kernel_set.rms_norm = rms_norm
    with pytest.raises(AttributeError, match="immutable"):
        kernel_set.device = "cuda"
    with pytest.raises(TypeError):
        kernel_set.functions["rms_norm"] = rms_norm
    with pytest.raises(TypeError):
        kernel_set.choices["rms_norm"] = None
    with pytest.raises(AttributeError):
        del kernel_set.device


def test_describe_names_op_backend_and_reason(interpreted):
    first, *lines = ops.resolve("cpu").describe().splitlines()
    assert first == "kernel set for cpu"
    assert {line.split()[0] for line in lines} == set(registry.contracts())
    line = next(line for line in lines if line.startswith("rms_norm "))
    assert line.split(maxsplit=2)[1:] == ["triton", "first choice on cpu: implements the contract"]


def test_describe_says_why_the_reference_serves():
    line = next(line for line in ops.resolve("cpu").describe().splitlines() if line.startswith("rms_norm "))
    _, backend, reason = line.split(maxsplit=2)
    assert (backend, reason.partition(" (")[0]) == ("torch", "triton: Triton has no target for cpu")


def test_resolution_is_cached(monkeypatch):
    kernel_set = ops.resolve("cpu")
    monkeypatch.setattr(registry, "_choose", lambda *_: pytest.fail("resolved twice"))
    assert ops.resolve("cpu") is kernel_set
    assert ops.resolve(torch.device("cpu")) is kernel_set
    ops.rms_norm(torch.randn(2, 8), None)


@pytest.mark.parametrize("op", registry.contracts())
def test_signature_is_the_contract(op):
    contract = registry.contracts()[op]
    assert inspect.signature(getattr(ops, op)) == inspect.signature(contract.reference)
    assert getattr(ops, op).__doc__ == contract.reference.__doc__


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def test_arguments_by_position_and_keyword_agree():
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = rms_norm(x, weight, 1e-3, 1.0)
    assert ops.rms_norm(x, weight, 1e-3, 1.0).equal(expected)
    assert ops.rms_norm(offset=1.0, eps=1e-3, weight=weight, x=x).equal(expected)
    assert ops.rms_norm(x, weight, offset=1.0, eps=1e-3).equal(expected)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (1, {}, r"rms_norm\(\) misses its argument 'weight'; it takes x, weight, eps"),
        (0, {"weight": None}, r"rms_norm\(\) misses its argument 'x'"),
        (2, {"epsilon": 1e-5}, r"rms_norm\(\) does not take 'epsilon'; it takes x, weight, eps"),
        (2, {"weight": None}, r"rms_norm\(\) does not take 'weight'"),
        (6, {}, r"rms_norm\(\) does not take 6 positional arguments"),
        (6, {"eps": 1e-5}, r"rms_norm\(\) does not take 'eps'"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_wrong_arguments(interpreted, backend, arguments, keywords, message):
    values = (torch.randn(2, 8), None, 1e-6, 0.0, False, 1)[:arguments]
    with ops.use_backend(backend), pytest.raises(TypeError, match=message):
        ops.rms_norm(*values, **keywords)


def test_autocast_leaves_fp64_alone():
    # as torch's own linear layers do
    x, gate_up, down = torch.randn(2, 4).double(), torch.randn(8, 4).double(), torch.randn(4, 4).double()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.linear(x, down).dtype == torch.float64
        assert ops.gated_mlp(x, gate_up, down).dtype == torch.float64


# ---------------------------------------------------------------------------------------------------------------------
# Naming a backend


def backend_of(op: str = "rms_norm") -> str:
    return ops.resolve("cpu").choices[op].backend


def test_use_backend_scopes_and_restores(interpreted):
    assert backend_of() == "triton"
    with ops.use_backend("torch"):
        assert backend_of() == "torch"
        with ops.use_backend("triton"):
            assert backend_of() == "triton"
        assert backend_of() == "torch"
        with pytest.raises(ZeroDivisionError), ops.use_backend("triton"):
            raise ZeroDivisionError
        assert backend_of() == "torch"
    assert backend_of() == "triton"


def test_the_named_torch_backend_is_the_reference(interpreted):
    with ops.use_backend("torch"):
        assert all(ops.resolve("cpu").functions[op] is contract.reference for op, contract in registry.contracts().items())


@pytest.mark.parametrize("name", ["tritn", "", "no.such", "../triton", "_triton"])
def test_an_unknown_backend(name):
    with pytest.raises(ops.KernelUnavailableError, match=r"no backend .*this installation has torch, triton"):
        ops.use_backend(name).__enter__()
    assert registry._named_backend is None


def test_a_named_backend_that_cannot_run_here():
    with ops.use_backend("triton"):
        assert ops.resolve("cpu").choices["rms_norm"].backend == "none"
        with pytest.raises(ops.KernelUnavailableError, match=r"rms_norm: backend 'triton' is not available: .*no target for"):
            ops.rms_norm(torch.randn(2, 8), None)


def test_a_named_backend_that_refuses_a_call(interpreted):
    with (
        ops.use_backend("triton"),
        pytest.raises(ops.KernelUnavailableError, match="rms_norm: backend 'triton' cannot serve this call: float64 input"),
    ):
        ops.rms_norm(torch.randn(2, 8).double(), None)


def test_an_automatic_refusal_falls_back_and_logs_once(interpreted, caplog):
    x = torch.randn(2, 8).double()
    with caplog.at_level(logging.WARNING, logger=registry.logger.name):
        results = [ops.rms_norm(x, None) for _ in range(3)]
    assert all(result.equal(rms_norm(x, None)) for result in results)
    (record,) = caplog.records
    for part in ("rms_norm", "'triton'", "float64 input"):
        assert part in record.getMessage()


def test_environment_names_the_backend_of_a_process():
    code = "from liger_models import ops; print(ops.resolve('cpu').choices['rms_norm'])"
    named = run(code, LIGER_BACKEND="triton", TRITON_INTERPRET="1")
    assert named.stdout.strip() == "Choice(op='rms_norm', backend='triton', reason='named by the user')", named.stderr
    failed = run(code, LIGER_BACKEND="tritn")
    assert "KernelUnavailableError: no backend 'tritn'; this installation has torch, triton" in failed.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Compiling and cost


def norm_twice(x, weight, **options):
    # a keyword taken out of a dictionary, as model code does: this must not break the graph
    options.pop("unused", None)
    return ops.rms_norm(ops.rms_norm(x, weight, eps=1e-5), weight, **options)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("resolved", [True, False], ids=["resolved before", "first call is compiled"])
def test_compiles_without_a_graph_break(interpreted, backend, resolved):
    torch.compiler.reset()
    x, weight = torch.randn(3, 8), torch.randn(8)
    with ops.use_backend(backend):
        if resolved:
            ops.resolve("cpu")
        compiled = torch.compile(norm_twice, fullgraph=True, backend="aot_eager")
        actual = gradients(lambda *a: compiled(*a, offset=1.0, unused=0), (x, weight), ("x", "weight"), ("x", "weight"))
        expected = gradients(lambda *a: norm_twice(*a, offset=1.0), (x, weight), ("x", "weight"), ("x", "weight"))
    # the same kernels, or torch's decompositions of the reference: a few roundings of fp32
    assert_close(actual, expected, 1e-5)


def test_the_first_call_of_a_process_may_be_compiled():
    result = run(
        """
        import torch
        from liger_models import ops
        compiled = torch.compile(lambda x: ops.rms_norm(x=x, weight=None).sum(), fullgraph=True, backend="aot_eager")
        x = torch.tensor([[3.0, 3.0]], requires_grad=True)
        compiled(x).backward()
        print(round(x.grad.abs().max().item(), 3), torch._dynamo.utils.counters["stats"]["unique_graphs"])
        """,
        TRITON_INTERPRET="1",
    )
    assert result.stdout.split() == ["0.0", "1"], result.stderr


def test_a_compiled_function_follows_the_choice_of_backend(interpreted):
    torch.compiler.reset()
    graphs = []

    def spy(graph, _example):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    compiled = torch.compile(lambda x: ops.rms_norm(x, None), fullgraph=True, backend=spy)
    x = torch.randn(3, 8)
    for backend in ("triton", "torch"):
        with ops.use_backend(backend):
            compiled(x)
    opaque = [any("liger_models.rms_norm_triton" in target for target in graph) for graph in graphs]
    assert opaque == [True, False]


def test_dispatch_costs_little(monkeypatch, capsys):
    def noop(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        return x

    contract = registry.Contract("noop", noop, ("x",), ("output",), (), registry._single_or_tuple)
    monkeypatch.setitem(registry._CONTRACTS, "noop", contract)
    op, x = ops._resolved(contract), torch.randn(1)

    def median(function) -> float:
        """Seconds per call: the median of 50 batches, each long enough for the clock."""
        samples = []
        for _ in range(50):
            start = time.perf_counter()
            for _ in range(200):
                function(x)
            samples.append((time.perf_counter() - start) / 200)
        return statistics.median(samples)

    assert op(x) is x
    cost = (median(op) - median(noop)) * 1e6
    with capsys.disabled():
        print(f"\ndispatch of an op: {cost:.2f} us more than the plain call")
    assert cost < 10  # the aim is 2 us on an idle machine; test machines are shared and slow


# ---------------------------------------------------------------------------------------------------------------------
# Vendors

NORM = """
import torch

calls = []

def forward(needs, x, weight, eps, offset, scale_in_fp32):
    calls.append("forward")
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x * rstd * (offset + weight), (rstd,)

def backward(needs, gradients, *, x, weight, offset, rstd):
    calls.append("backward")
    (dy,) = gradients
    normalised = x * rstd
    scaled = dy * (offset + weight)
    dx = rstd * (scaled - normalised * (scaled * normalised).mean(-1, keepdim=True)) if needs.x else None
    return dx, ((dy * normalised).sum(tuple(range(dy.dim() - 1))) if needs.weight else None)

def refuses(x, weight, eps, offset, scale_in_fp32):
    return "it needs a weight" if weight is None else None
"""


@pytest.fixture
def make_vendor(tmp_path, monkeypatch):
    """A function that writes a vendor's package, for device `cpu`, from the sources of its modules; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    created = []

    def make(name: str, *, init: str = "def unavailable(device): return None", **modules: str) -> str:
        (tmp_path / name).mkdir()
        for module, source in {"__init__": init, **modules}.items():
            (tmp_path / name / f"{module}.py").write_text(source)
        created.append(name)
        return name

    yield make
    for module in list(sys.modules):
        if module.partition(".")[0] in created:
            del sys.modules[module]


def test_a_vendor_overrides_one_op_and_the_others_fall_back(interpreted, make_vendor):
    package = make_vendor("acme_one", rms_norm=NORM)
    ops.register_vendor(ops.VendorInfo("acme_one", "cpu", package))
    choices = ops.resolve("cpu").choices
    assert choices["rms_norm"].backend == "acme_one"
    assert {choice.backend for op, choice in choices.items() if op != "rms_norm"} <= {"triton", "torch"}
    assert choices["swiglu"].backend == "triton"
    assert ops.get_vendor_for_device("cpu") == ops.VendorInfo("acme_one", "cpu", package)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wanted", [(), ("x",), ("weight",), ("x", "weight")])
def test_a_vendors_op_runs_through_the_same_autograd_wrapper(make_vendor, compiled, wanted):
    torch.compiler.reset()
    package = make_vendor("acme_grad", rms_norm=NORM)
    ops.register_vendor(ops.VendorInfo("acme_grad", "cpu", package))
    ops.resolve("cpu")
    arguments = (torch.randn(2, 3, 8), torch.randn(8), 1e-6, 1.0)
    op = torch.compile(ops.rms_norm, fullgraph=True, backend="aot_eager") if compiled else ops.rms_norm
    names = registry.contracts()["rms_norm"].names
    assert_close(gradients(op, arguments, names, wanted), gradients(rms_norm, arguments, names, wanted), 1e-5)
    assert compiled or sys.modules[f"{package}.rms_norm"].calls == ["forward", *(["backward"] if wanted else [])]


def test_a_vendors_refusal_falls_back_and_logs(make_vendor, caplog):
    ops.register_vendor(ops.VendorInfo("acme_refuses", "cpu", make_vendor("acme_refuses", rms_norm=NORM)))
    x = torch.randn(2, 8)
    with caplog.at_level(logging.WARNING, logger=registry.logger.name):
        assert ops.rms_norm(x, None).equal(rms_norm(x, None))
    assert ["acme_refuses" in r.getMessage() and "needs a weight" in r.getMessage() for r in caplog.records] == [True]


def test_a_vendors_package_is_imported_for_its_device_only(make_vendor):
    package = make_vendor("acme_lazy", rms_norm=NORM)
    ops.register_vendor(ops.VendorInfo("acme_lazy", "cpu", package))
    ops.rms_norm(torch.randn(2, 8, device="meta"), None)
    with ops.use_backend("acme_lazy"):
        assert package not in sys.modules
        with pytest.raises(ops.KernelUnavailableError, match=r"rms_norm.*'acme_lazy'.*it serves cpu, not meta"):
            ops.rms_norm(torch.randn(2, 8, device="meta"), None)
    assert package not in sys.modules
    ops.rms_norm(torch.randn(2, 8), torch.randn(8))
    assert package in sys.modules


def test_registering_a_vendor_ends_earlier_resolutions(make_vendor):
    assert backend_of() == "torch"
    ops.register_vendor(ops.VendorInfo("acme_late", "cpu", make_vendor("acme_late", rms_norm=NORM)))
    assert backend_of() == "acme_late"


def test_a_vendor_that_cannot_run_says_why(make_vendor):
    package = make_vendor("acme_down", init="def unavailable(device): return 'its driver is too old'")
    ops.register_vendor(ops.VendorInfo("acme_down", "cpu", package))
    assert "acme_down: its driver is too old" in ops.resolve("cpu").describe()
    with (
        ops.use_backend("acme_down"),
        pytest.raises(ops.KernelUnavailableError, match=r"rms_norm.*acme_down.*driver"),
    ):
        ops.rms_norm(torch.randn(2, 8), None)


@pytest.mark.parametrize("place", ["init", "rms_norm"])
def test_import_errors_inside_a_backend_are_not_swallowed(make_vendor, place):
    package = make_vendor(f"acme_broken_{place}", **{"rms_norm": NORM, place: "import a_dependency_that_is_missing"})
    ops.register_vendor(ops.VendorInfo(package, "cpu", package))
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_missing"):
        ops.rms_norm(torch.randn(2, 8), torch.randn(8))


def test_entry_points_register_vendors_and_add_ops(tmp_path):
    """A package outside the repository: its entry point is loaded when the registry is, its kernels are not."""
    (tmp_path / "acme.py").write_text(
        "from torch import Tensor\n"
        "from liger_models.kernels.registry import VendorInfo, contract, register_vendor\n"
        "register_vendor(VendorInfo('acme', 'cpu', 'acme_kernels'))\n"
        "@contract(differentiable=('x',))\n"
        "def acme_double(x: Tensor) -> Tensor:\n"
        "    '''Twice x.'''\n"
        "    return x * 2\n"
    )
    (tmp_path / "acme_kernels").mkdir()
    (tmp_path / "acme_kernels" / "__init__.py").write_text("def unavailable(device): return None")
    (tmp_path / "acme_kernels" / "rms_norm.py").write_text(NORM)
    information = tmp_path / "acme-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\nacme = acme\n")
    result = run(
        """
        import sys, torch
        from liger_models import ops
        assert "acme" in sys.modules and "acme_kernels" not in sys.modules
        print(ops.rms_norm(torch.tensor([[3.0, 3.0]]), torch.ones(2), 0.0).tolist(), ops.acme_double(torch.ones(1)).item())
        print({name: ops.resolve("cpu").choices[name].backend for name in ("rms_norm", "swiglu", "acme_double")})
        """,
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "[[1.0, 1.0]] 2.0", "{'rms_norm': 'acme', 'swiglu': 'torch', 'acme_double': 'torch'}"
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Importing the package


def test_importing_the_package_is_light():
    result = run("import liger_models, sys; print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))")
    assert result.stdout.strip() == "[]", result.stderr


def test_ops_and_losses_import_from_the_package():
    result = run("from liger_models import ops, losses; print(ops.rms_norm.__module__, losses.__name__)")
    assert result.stdout.split() == ["liger_models.ops", "liger_models.losses"], result.stderr
