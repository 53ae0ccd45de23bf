"""TorchTitan's modules copy the device when they are imported: say CPU before any test file imports them.

One thread, because tests fork the app from this process and an OpenMP pool does not survive a fork (see cli.py).
"""

import torch
from titan_recipes.device import set_device

set_device("cpu")
torch.set_num_threads(1)
