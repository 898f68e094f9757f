"""What alarms make of recorded runs, and what rows say to a claim.

Two kinds of alarms look at a run: the default ones, which know the run itself only (`replayed`),
and bands that are learned from clean runs of other seeds (`first_outside`). `judge` compares what
the default ones said with what was wrong. Not here: the rules of either (`stabmon.alarms`), and
which runs there are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.loop.alarms import AlarmConfig
from experiments.support.arms import CLEAN
from experiments.support.tables import listed, listing
from stabmon.alarms.detector_set import LOSS
from stabmon.alarms.detectors.bands import BandDetector
from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.lead import first_by_key
from stabmon.alarms.reference import Reference
from stabmon.alarms.signatures import Fault
from stabmon.quantities import HELD_OUT
from stabmon.recovery.ladder import Policy
from stabmon.recovery.ledger import CheckpointLedger
from stabmon.recovery.recovery import Recovery
from stabmon.recovery.replay import replay_events, standard_watcher
from stabmon.runs.run import Run

LOSSES = (LOSS, HELD_OUT)
WORDS = ("reproduces", "partly", "not at this size")


def replayed(run: Run, warmup: int, alarms: AlarmConfig) -> Run:
    """The run with the events that the default alarms raise over its samples, and no others.

    They are what the alarms say while a run goes on, so rules can change without training anew.
    """
    policy = Policy(watch=alarms.watch, verify=alarms.verify)
    ledger = CheckpointLedger(alarms.dwell, alarms.min_grade)
    watcher = standard_watcher(run, warmup, alarms.window)
    events = replay_events(run, replace(watcher, recovery=Recovery(policy, ledger)))
    return replace(run, events=tuple(events))


def alarm_events(run: Run, since: int = 0) -> list[Mapping[str, Any]]:
    """The alarms among a run's events, from a step on."""
    return [x for x in run.events if x["kind"] == "alarm" and x["step"] >= since]


def first_step(alarms: Iterable[Mapping[str, Any]], onset: int = 0) -> int | None:
    """Steps from the onset to the first of some alarms; None without any."""
    return min((x["step"] - onset for x in alarms), default=None)


def first_outside(run: Run, reference: Reference) -> dict[str, Alarm]:
    """{metric: its first alarm} against bands: |z| > 5 in two samples running."""
    return first_by_key(run, BandDetector(reference))


def judge(
    run: Run, case: str, seed: int, truth: str, onset: int, steps: int, judged_from: int
) -> dict[str, Any]:
    """What the alarms made of a run, for a row.

    Args:
        run: The run with the events of its alarms.
        case: Name of its case.
        seed: Its seed.
        truth: The right diagnosis, `CLEAN` for none.
        onset: First step with the fault; of a clean run its length.
        steps: Length of the run.
        judged_from: First step that the alarms judge.

    Returns:
        named: the diagnosis at the end, `CLEAN` without any alarm; first_named: the first that was
        not "unknown", likewise; first_alarm, loss_alarm: steps from the onset to the first alarm
        and to the first of a loss, None without; lead: steps from the one to the other, or to the
        end; false_alarms: those before the onset; false_actions: what was advised before it;
        clean_steps: steps of a clean run in which an alarm was possible, 0 for a faulty run, which
        repeats the clean run of its seed up to the onset.
    """
    alarms, late = alarm_events(run), alarm_events(run, onset)
    loss = [x for x in late if x["key"] in LOSSES]
    silent = str(Fault.UNKNOWN) if alarms else CLEAN
    named = [x["fault"] for x in run.events if x["kind"] == "diagnosis"] or [silent]
    known = [x for x in named if x != Fault.UNKNOWN]
    first, first_loss = first_step(late, onset), first_step(loss, onset)
    end = steps - onset if first_loss is None else first_loss
    early = [x for x in run.events if x["step"] < onset]
    return {
        "case": case,
        "seed": seed,
        "truth": str(truth),
        "named": named[-1],
        "first_named": known[0] if known else silent,
        "first_alarm": first,
        "loss_alarm": first_loss,
        "lead": None if first is None else end - first,
        "false_alarms": [
            f"{x['step']} {x['rule']} {x['key']}" for x in early if x["kind"] == "alarm"
        ],
        "clean_steps": max(steps - judged_from, 0) if truth == CLEAN else 0,
        "false_actions": [f"{x['step']} {x['action']}" for x in early if x["kind"] == "action"],
        "steps": steps,
    }


@dataclass(frozen=True)
class Claim:
    """A claim, and in which runs it held.

    Attributes:
        words: The claim.
        held: By run.
        said: Numbers behind it; may be empty.
    """

    words: str
    held: tuple[bool, ...]
    said: str = ""

    @property
    def verdict(self) -> str:
        """One of `WORDS`: it held in all runs, in some, in none.

        >>> Claim("x", (True, False)).verdict
        'partly'
        """
        return WORDS[0 if all(self.held) else 1 if any(self.held) else 2]

    @property
    def count(self) -> str:
        """In how many runs it held, and the numbers."""
        return f"{sum(self.held)} of {len(self.held)}{self.said}"


def overall(claims: Sequence[Claim]) -> str:
    """The verdict that all claims have in common, else "partly"."""
    verdicts = {x.verdict for x in claims}
    return min(verdicts) if len(verdicts) == 1 else WORDS[1]


def claim(
    words: str, parts: Mapping[str, Sequence[float]], holds: Callable[[float], bool], note: str = ""
) -> Claim:
    """A claim about numbers, one for each run.

    Args:
        words: The claim.
        parts: {arm: a number for each of its runs}.
        holds: Whether it holds for one of them.
        note: Before the numbers.
    """
    numbers = "; ".join(f"{arm}: {listed(of, '+.2f')}" for arm, of in parts.items() if of)
    held = tuple(holds(x) for of in parts.values() for x in of)
    return Claim(words, held, f"{note}: {numbers}")


def claims_table(claims: Sequence[Claim], head: str = "runs for it") -> str:
    """A line for each claim."""
    return listing([{"claim": x.words, "verdict": x.verdict, head: x.count} for x in claims])
