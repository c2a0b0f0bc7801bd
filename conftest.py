"""Guards shared by all tests."""

import importlib
import os
import sys

import torch

# The root of the repository is on the path while tests run, so the bare names would find our folders: `kernels` in place of
# the Hugging Face package of that name, `conversions` as a second copy of liger_models.conversions.
for name in ("kernels", "conversions"):
    sys.modules[name] = None  # type: ignore[assignment]

# triton.language decides at its import whether its functions run in the interpreter, and torch imports it when it pleases
# (torch.utils.checkpoint does). Without a GPU the tests of Triton kernels need the interpreter; no other test sees the switch.
if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    previous = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.language")
    if previous is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = previous
