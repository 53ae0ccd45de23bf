"""Contract of the package: completion shows what it has, and its version is the installed one."""

import subprocess
import sys
from importlib.metadata import version


def test_completion_shows_the_lazy_names_and_the_version_is_the_installed_one() -> None:
    code = "import qwen3_core as m; print(*sorted(set(m.__all__) - set(dir(m))), m.__version__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == f"{version('qwen3-core')}\n", result
