"""TorchTitan's modules copy the device when they are imported: say CPU before any test file imports them.

One thread, because tests fork the app from this process and an OpenMP pool does not survive a fork (see cli.py).
"""

import pytest
import torch
from titan_recipes.device.select import set_device

set_device("cpu")
torch.set_num_threads(1)

LONGEST = ("test_train_debug", "test_routes", "test_train_layouts", "test_train_stop", "test_train_routes")


def pytest_collection_modifyitems(items):
    """The longest files first: two workers take whole files, and one should not end with a long one alone."""
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Token stores of the apps that tests run go to a folder of the session's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
