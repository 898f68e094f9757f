"""Environments of their own for real packages, made once and kept in `.cache/environments`."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_with(name: str, requirements: tuple[str, ...], script: Path, *arguments: str) -> str:
    """Runs a script of the tests where some packages are installed; its output.

    This project, and what it needs and the packages do not bring, comes from the environment of the
    tests. Skips the test where the packages cannot be installed.

    Args:
        name: Of the environment.
        requirements: What pip installs.
        script: The script.
        arguments: Its arguments.
    """
    folder = ROOT / ".cache" / "environments" / name
    python, marker = folder / "bin" / "python", folder / "installed.txt"
    if not marker.is_file() or marker.read_text() != "\n".join(requirements):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", *requirements]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{', '.join(requirements)}: {done.stderr.strip()[-300:]}")
        marker.write_text("\n".join(requirements))
    ours = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"], *filter(None, sys.path)])
    settings = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "STABMON_PATHS": ours,
    }
    done = subprocess.run(
        [python, script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | settings,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
