"""Starts an example in an environment of its own: `start.py NAME ARGUMENTS…`; see `run_with`."""

import os
import runpy
import sys

sys.path.extend(os.environ["STABMON_PATHS"].split(os.pathsep))
sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
sys.argv.pop(0)
runpy.run_module(f"examples.{sys.argv[0]}", run_name="__main__")
