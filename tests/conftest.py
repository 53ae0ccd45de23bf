"""What holds for every package's tests."""

import sys


def pytest_collection_finish() -> None:
    """Start autograd's threads, if any test imported torch, before a test can fork.

    The first backward of a process decides whether its forks may run one. FakeTensorMode shows torch a CUDA device, so
    a process whose first backward is a fake one starts threads for it, and from then on every forked rank's backward
    raises: a test that forks would pass or fail with the order in which xdist deals out the files.
    """
    if torch := sys.modules.get("torch"):
        torch.ones(1, requires_grad=True).sum().backward()
