"""What `Contracts` has learned, as JSON can hold it, so that a resumed run goes on as it was.

What is learned is `judge.py`'s.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from stabmon.contracts.contract import Known, Sample
from stabmon.contracts.digest import Form


def packed_sample(sample: Sample | None) -> dict[str, Any] | None:
    """Returns a sample without its form, None without one.

    Args:
        sample: The sample.
    """
    if sample is None:
        return None
    row = np.concatenate([*sample.values.values()]).astype("<f4")
    text = base64.b64encode(row.tobytes()).decode()
    kept = {"step": sample.step, "rate": sample.rate, "rate_before": sample.rate_before}
    return kept | {"form": _checksum(sample.form), "row": text}


def unpacked_sample(kept: Mapping[str, Any] | None, form: Form) -> Sample | None:
    """Returns the sample that was kept, None where its numbers are of another form.

    Args:
        kept: From `packed_sample`.
        form: What the numbers of this run are.
    """
    if kept is None or kept["form"] != _checksum(form):
        return None
    row = np.frombuffer(base64.b64decode(kept["row"]), "<f4")
    rates = {name: kept[name] for name in ("rate", "rate_before")}
    return Sample(int(kept["step"]), form, form.unpack(row), **rates)


def packed_known(known: Known) -> dict[str, Any]:
    """Returns what was learned; what is declared is given anew at each start.

    Args:
        known: What is known.
    """
    listed = lambda found: None if found is None else sorted(found)
    return {
        "still": listed(known.still),
        "moved": known.moved,
        "masters": listed(known.masters),
        "ties": None if known.ties is None else [[*x, y] for x, y in known.ties.items()],
        "types": known.types,
        "past": [list(row) for row in known.past],
    }


def unpacked_known(known: Known, kept: Mapping[str, Any]) -> None:
    """Puts what was learned into `known`.

    Args:
        known: What is declared.
        kept: From `packed_known`.
    """
    named = lambda found: None if found is None else set(found)
    known.still, known.masters = named(kept["still"]), named(kept["masters"])
    known.moved, known.types = dict(kept["moved"]), dict(kept["types"])
    ties = kept["ties"]
    known.ties = None if ties is None else {(a, b): bool(both) for a, b, both in ties}
    known.past = [(int(step), size, rate, dict(x)) for step, size, rate, x in kept["past"]]


def _checksum(form: Form) -> int:
    return zlib.crc32(repr(form.blocks).encode())
