"""TorchTitan's step folders: names, completeness, strict loads, assets."""
