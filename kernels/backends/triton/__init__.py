"""The default accelerated backend: Triton kernels for CUDA, ROCm and XPU, and for CPU tensors in Triton's interpreter."""

import importlib.util
import os

DEVICES = ("cuda", "xpu")


def unavailable(device: str) -> str | None:
    """Why this backend cannot run on a device type, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device in DEVICES:
        return None
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"Triton has no target for {device} (on cpu: only with TRITON_INTERPRET=1, for tests)"
