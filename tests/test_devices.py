"""The tests in tests/devices, which need a process with eight virtual devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def test_eight_virtual_devices(request: pytest.FixtureRequest):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", request.config.option.markexpr]
    done = subprocess.run([*command, HERE / "devices"], cwd=HERE.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
