"""The README's examples run as they stand, the first from the wheel alone."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from stabmon.runs.run import load_run

ROOT = Path(__file__).parent.parent


def blocks():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def ran(code):
    namespace = {"stabmon": __import__("stabmon")}
    exec(compile(code, "README.md", "exec"), namespace)
    return namespace


def test_the_first_program_is_short():
    assert len(blocks()[0].splitlines()) <= 40


@pytest.mark.slow
def test_the_first_program_runs_from_the_wheel_alone_and_ends_with_a_report(tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    bare = {x: value for x, value in os.environ.items() if not x.startswith(("PYTHON", "STABMON"))}

    def call(*arguments):
        done = subprocess.run(
            [python, *arguments],
            cwd=tmp_path,
            env=bare | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr[-3000:]

    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    code, output = call("-m", "pip", "install", "--quiet", "hatchling")
    if code:
        pytest.skip(f"nothing can be installed here: {output[-300:]}")
    options = (
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path / "dist"),
    )
    code, output = call("-m", "pip", "wheel", *options, str(ROOT))
    assert code == 0, output
    (wheel,) = (tmp_path / "dist").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert {"stabmon/py.typed", "optax_ext/py.typed"} <= {*names}
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "stabmon",
        "optax_ext",
    }
    code, output = call("-m", "pip", "install", "--quiet", f"{wheel}[cli]", "flax")
    assert code == 0, output
    (tmp_path / "first.py").write_text(blocks()[0], encoding="utf-8")
    code, output = call("-I", "first.py")
    assert (code, output.strip()) == (0, "runs/first/report.html")
    assert "<html" in (tmp_path / "runs/first/report.html").read_text(encoding="utf-8")
    found = load_run(tmp_path / "runs/first")
    assert found.events == ()
    losses = found.metrics["symptoms/global/loss/value"][1]
    assert losses[-1] < 0.7 * losses[0]
    assert "delta200/global/delta2/entropy/mean" in found.metrics


def test_a_layout_of_ones_own_has_its_rules():
    assert ran(blocks()[1])["layout"].rules[0].rank == 3


def test_the_monitor_by_hand_measures_what_it_says():
    values = ran(blocks()[2])["values"]
    assert values["symptoms/global/loss/value"] == 2.5


def test_the_msign_example_runs():
    namespace = ran(blocks()[3])
    params = {"layers": {"attn": {name: {"kernel": jnp.ones((1, 4, 2, 2))} for name in "qkv"}}}
    state = namespace["tx"].init(params)
    updates, _ = namespace["tx"].update(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_every_path_that_is_named_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:stabmon|optax_ext|models|experiments|tests)/[\w./]*)`", text))
    assert paths
    assert [p for p in paths if not (ROOT / p).exists()] == []
