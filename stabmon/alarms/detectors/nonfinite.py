"""Values that are not finite: one alarm an incident.

Which rule such a value breaks is `base.py`'s (`rule_of`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from stabmon.alarms.detectors.base import NON_FINITE, UNREADABLE, Alarm, rule_of


@dataclass
class Incidents:
    """Lets through the first alarm of an incident.

    One of values that are not finite lasts from the first of them until all are finite again, and
    what is unreadable meanwhile belongs to it. One of unreadable metrics likewise.

    >>> incidents, nan = Incidents(), math.nan
    >>> first = {"symptoms/global/loss/value": nan}
    >>> len(incidents.admitted(first, [Alarm(5, "non-finite", key, nan) for key in first]))
    1
    >>> later = {"router/global/entropy/mean": nan}
    >>> incidents.admitted(later, [Alarm(6, "unreadable", key, nan) for key in later])
    []

    Attributes:
        broken: {metric that is not finite now: rule}.
    """

    broken: dict[str, str] = field(default_factory=dict)

    def admitted(self, values: Mapping[str, float], alarms: list[Alarm]) -> list[Alarm]:
        """The alarms of a sample, less those of an incident that has been told already."""
        told = set(self.broken.values())
        for key, value in values.items():
            count = key.endswith("/nonfinite/value") and value > 0
            if count or not math.isfinite(value):
                self.broken[key] = rule_of(key)
            else:
                self.broken.pop(key, None)
        if NON_FINITE in self.broken.values():
            told.add(UNREADABLE)
        kept = []
        for alarm in alarms:
            rule = self.broken.get(alarm.key)
            if rule not in told:
                kept.append(alarm)
            if rule is not None:
                told.add(rule)
        return kept
