"""`Watch`: monitors, alarms, run folder, report and recovery around any training loop."""

from stabmon.watch.watch import Watch as Watch
