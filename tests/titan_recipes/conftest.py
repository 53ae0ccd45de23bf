"""TorchTitan's modules copy the device when they are imported: say CPU before any test file imports them."""

from titan_recipes.device import set_device

set_device("cpu")
