"""TorchTitan's modules copy the device when they are imported: say CPU before any test file imports them."""

import pytest
from titan_recipes.device.select import set_device

set_device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Token stores go to a folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "titan-recipes" / "tokens"
