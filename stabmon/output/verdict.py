"""What the alarms of some runs amount to: the lead-time table, the verdict, the story.

What lives here: `alarm_table`, `default_verdict` and `story`, all from the events and faults that
the runs themselves recorded. What does not: raising alarms (`stabmon.alarms`), HTML (`sections`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stabmon.quantities import split_key, title_of
from stabmon.runs.run import Run


def alarm_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns the first alarm of each quantity in each run, earliest first.

    Columns: `run` (only with alarms in several runs), `monitor`, `first`, `after` (steps from the
    onset, None without a fault) and `lead`, the steps by which it came before the first alarm on
    the loss, or before the end where the loss had none (`lead_is_bound`).

    Args:
        runs: Runs as they were read.
    """
    rows = []
    for run in runs:
        first = _first_alarms(run)
        onset, loss = first_onset(run), _loss_alarm(first)
        for name, step in first.items():
            row = {"run": run.name, "monitor": title_of(name), "first": step}
            row["after"] = None if onset is None else step - onset
            row["lead"] = (_last_step(run) if loss is None else loss) - step
            row["lead_is_bound"] = loss is None
            rows.append(row)
    several = len({row["run"] for row in rows}) > 1
    rows.sort(key=lambda row: row["first"])
    return [row if several else {k: v for k, v in row.items() if k != "run"} for row in rows]


def default_verdict(runs: Sequence[Run]) -> str:
    """Returns what the run with the earliest alarm was found to have, and that alarm in a sentence.

    Where it came from, how long after the fault, how long before the loss.

    Args:
        runs: Runs as they were read.
    """
    alarms = [(step, name, run) for run in runs for name, step in _first_alarms(run).items()]
    if not alarms:
        faulty = [run.name for run in runs if run.faults]
        return f"No alarm, although {', '.join(faulty)} had a fault." if faulty else "No alarm."
    step, name, run = min(alarms, key=lambda alarm: alarm[0])
    onset, loss = first_onset(run), _loss_alarm(_first_alarms(run))
    found = named(run.events)
    text = f"{run.name}: " if found is None else f"{run.name}: {_finding(found)}. "
    text += "first" if found is None else "First"
    text += f" alarm at step {step:,} from {title_of(name)}"
    if onset is not None:
        side = "after" if step >= onset else "before"
        text += f", {abs(step - onset):,} steps {side} the fault set in"
    if loss is not None and loss > step:
        text += f" and {loss - step:,} steps before the loss"
    elif loss is None:
        text += "; the loss raised none"
    return f"{text}."


def named(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns the diagnosis in force, None without one: the last, unless a rewind undid it.

    One that says "unknown" counts where it is all there is.

    Args:
        events: A run's events, in order.
    """
    found = None
    for event in events:
        if event.get("kind") == "rewind":
            found = None
        elif event.get("kind") == "diagnosis" and (
            found is None or event.get("fault") != "unknown"
        ):
            found = event
    return found


def story(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns what the runs were found to have and what was done, run by run, in order.

    Columns: `step`, `run` (only of several), `what`, and `why`: the strongest evidence for a
    diagnosis, the reason of an action.

    Args:
        runs: Runs as they were read.
    """
    rows = []
    for run in runs:
        for event in run.events:
            kind, step = event.get("kind"), event.get("step")
            if kind == "diagnosis":
                what, why = _finding(event), event.get("evidence") or ("",)
                why = why[0] if isinstance(why, list | tuple) else why
            elif kind == "action":
                advice = "advised: " if event.get("dry") else ""
                amount = "".join(
                    f" {word} {event[field]}"
                    for field, word in (("scale", "to"), ("target", "to step"))
                    if field in event
                )
                what, why = f"{advice}{event.get('action', 'action')}{amount}", event.get("reason")
            elif kind == "contract":
                what = f"contract {event.get('contract')} broken: {event.get('leaf')}"
                why = event.get("sentence")
            elif kind in ("rewind", "stopped"):
                what, why = str(kind), ""
            else:
                continue
            rows.append({"step": step, "run": run.name, "what": what, "why": str(why or "")})
    several = len({row["run"] for row in rows}) > 1
    return [row if several else {k: v for k, v in row.items() if k != "run"} for row in rows]


def _finding(event: Mapping[str, Any]) -> str:
    """A diagnosis in words: fault, where, how sure."""
    where = "".join(
        f", {name} {event[name]}" for name in ("layer", "head") if event.get(name) is not None
    )
    parts = ", ".join(str(x) for x in event.get("parts", ()))
    sure = event.get("confidence")
    sure = f", confidence {sure:.2f}" if isinstance(sure, int | float) else ""
    return f"{event.get('fault', 'unknown')}{f' ({parts})' if parts else ''}{where}{sure}"


def first_onset(run: Run) -> int | None:
    """Returns the step at which the run's first fault set in, None without one.

    Args:
        run: A run as it was read.
    """
    onsets = [fault["onset"] for fault in run.faults if isinstance(fault.get("onset"), int)]
    return min(onsets, default=None)


def _first_alarms(run: Run) -> dict[str, int]:
    """Quantity → step of its first alarm."""
    first: dict[str, int] = {}
    for event in run.events:
        if event.get("kind") == "alarm" and isinstance(event.get("step"), int):
            parts = split_key(str(event.get("key")))
            name = parts.quantity if parts else str(event.get("key", event.get("rule", "alarm")))
            first[name] = min(event["step"], first.get(name, event["step"]))
    return first


def _last_step(run: Run) -> int:
    """Step of the newest sample or event."""
    samples = [int(steps[-1]) for steps, _ in run.metrics.values()]
    return max(samples + [e["step"] for e in run.events if isinstance(e.get("step"), int)])


def _loss_alarm(first: dict[str, int]) -> int | None:
    """Step of the first alarm on a training loss."""
    steps = [step for name, step in first.items() if name.split("/")[-1] == "loss"]
    return min(steps, default=None)
