import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny products run faster on one thread, and always add up in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
