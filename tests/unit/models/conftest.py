import pytest
import torch


@pytest.fixture
def uninitialized_memory_is_nan():
    """Whatever initialisation leaves out shows up as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
