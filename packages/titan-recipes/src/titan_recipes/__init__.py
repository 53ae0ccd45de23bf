"""What joins the Qwen3 layers to TorchTitan: device, launcher, data, trainer, reports.

Importing this package defines nothing but its name: `titan_recipes.cli` stays light enough for `--help`, and everything
that needs torch or TorchTitan is imported by the module that uses it.
"""
