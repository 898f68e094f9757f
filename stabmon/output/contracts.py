"""What a run's contracts came to, in a line: how many hold, which are broken, where and since when.

What contracts are is `stabmon.contracts`'s.
"""

from stabmon.quantities.contracts import TITLES
from stabmon.runs.run import Run

_SAID = 3


def contract_line(run: Run) -> str:
    """Returns the line, empty for a run that asked none.

    A contract holds if the newest sample of it has no broken leaf.

    Args:
        run: A run as it was read.

    Example:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> metrics = {"contracts/global/moves/value": (np.array([50]), np.array([0.0]))}
        >>> contract_line(Run("a", Path("a"), {}, metrics, (), ()))
        '1 contract holds.'
    """
    newest = {
        name: float(run.metrics[key][1][-1])
        for name in TITLES
        if (key := f"contracts/global/{name}/value") in run.metrics
    }
    rows = [event for event in run.events if event.get("kind") == "contract"]
    broken = dict.fromkeys([name for name, count in newest.items() if count])
    broken |= dict.fromkeys(x["contract"] for x in rows if x.get("contract") == "restore")
    if not newest and not broken:
        return ""
    many = len(newest.keys() - broken.keys())
    line = f"{many} contract{' holds' if many == 1 else 's hold'}"
    if not broken:
        return f"{line}."
    told = []
    for name in broken:
        own = [row for row in rows if row.get("contract") == name]
        leaves = "; ".join(f"{x['leaf']} since step {x['since']:,}" for x in own[:_SAID])
        more = f" and {len(own) - _SAID} more" if len(own) > _SAID else ""
        told.append(f"“{TITLES.get(name, name)}” is broken: {leaves}{more}")
    return f"{line}; {'; '.join(told)}."
