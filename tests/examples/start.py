"""Starts an example in an environment of its own: `start.py NAME ARGUMENTS…`; see `run_with`."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder holds no packages, and the tests' own are behind those of the environment.
    sys.path.remove(str(Path(__file__).parent))
    sys.path.extend(os.environ["STABMON_PATHS"].split(os.pathsep))
    sys.argv.pop(0)
    runpy.run_module(f"examples.{sys.argv[0]}", run_name="__main__")
