"""What `stabmon scan` does: opens, measures with progress, prints.

What lives here: `run_scan`. What does not: the command's arguments and exit codes (`stabmon.cli`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from stabmon.checkpoints.folders import open_checkpoints
from stabmon.layout.file import layouts
from stabmon.output.terminal import progress, show_json
from stabmon.scan.health import Limits, Report, scan
from stabmon.scan.table import as_json, show


def run_scan(
    console: Console,
    paths: Sequence[Path],
    limits: Limits,
    layout: Path | None,
    heads: Mapping[str, int | None],
    *,
    every: bool = False,
    json: bool = False,
) -> Report:
    """Scans what lies at some paths, and prints it.

    Args:
        console: Where to.
        paths: Files or folders, in the order of training.
        limits: What counts as wrong.
        layout: A file with a layout; None: those of known libraries.
        heads: `heads` and `kv_heads`, where shapes do not tell.
        every: A line for each matrix.
        json: JSON instead of tables.
    """
    found = open_checkpoints(paths)
    total = sum(leaf.nbytes for x in found for leaf in x.leaves.values())
    with progress(total) as advance:
        report = scan(found, limits, layouts(layout), **heads, progress=advance)
    if json:
        show_json(console, as_json(report))
    else:
        show(console, report, every=every)
    return report
