"""Guards shared by all tests."""

import sys

# The root of the repository is on the path while tests run, so the bare names would find our folders: `kernels` in place of
# the Hugging Face package of that name, `conversions` as a second copy of liger_models.conversions.
for name in ("kernels", "conversions"):
    sys.modules[name] = None  # type: ignore[assignment]
