import pytest


@pytest.fixture(autouse=True)
def kernels_by_themselves(poisoned_empty, resolved_anew):
    """Tests of kernels find NaN in memory that nothing was written to, and leave no interpreted kernel behind."""
