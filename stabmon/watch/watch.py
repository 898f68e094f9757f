"""`Watch`: monitors, alarms, run folder, report and recovery around any training loop.

What lives here: the object that a training loop holds. What does not: what is measured (`monitor`),
what is judged (`alarms`), how a rollback is carried out (`recovery`), files (`runs`).
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import PyTree

from stabmon.alarms.detector_set import DetectorSet
from stabmon.hosts import agree, leads
from stabmon.layout import Layout, find_layout
from stabmon.monitor import Monitor, Readings
from stabmon.output.sinks.writers import Writer
from stabmon.recovery.carrying_out import CarryingOut, Restore, Save
from stabmon.recovery.control import change
from stabmon.recovery.ladder import EXIT_UNRECOVERED, Policy
from stabmon.recovery.ledger import CheckpointLedger
from stabmon.runs.runlog import RunLog
from stabmon.watch import termination
from stabmon.watch.defaults import declared, default_monitor, default_watcher
from stabmon.watch.journal import Journal, OnEvents, OnIncident
from stabmon.watch.recovering import Recovering
from stabmon.watch.restores import Restores
from stabmon.watch.schedule import Schedule, warmup_of


class Watch(Recovering):
    """Watches one training run; the same around every trainer.

    Put `transforms()` behind the optimizer, call `measure` in the jitted step and `observe` on the
    host. `checkpoint` and `resume` make it survive a restart. With `act=True` it also carries out
    the recovery ladder; see `apply`.

    Attributes:
        folder: The run's folder.
        layout: Where the matrices lie.
        monitor: What is measured how often.
        watcher: Detectors and ladder.
        step: The next step: one more than was observed last, or where a rollback went back to.

    >>> import tempfile, jax.numpy as jnp, optax, stabmon
    >>> attn = {name: {"kernel": jnp.ones((2, 8, 4, 2))} for name in "qkv"}
    >>> params = {"layers": {"attn": attn}}
    >>> with stabmon.Watch(tempfile.mkdtemp(), params, schedule=lambda step: 0.1) as watch:
    ...     tx = optax.chain(optax.sgd(0.1), watch.transforms())
    ...     readings = watch.measure(0, params, tx.init(params))
    ...     watch.observe(0, readings, loss=2.5)
    >>> from stabmon.runs.run import load_run
    >>> load_run(watch.folder).metrics["symptoms/global/loss/value"]
    (array([0]), array([2.5]))
    """

    def __init__(
        self,
        folder: str | Path,
        params: PyTree,
        *,
        config: Mapping[str, Any] | None = None,
        schedule: Schedule = None,
        layout: Layout | None = None,
        monitor: Monitor | None = None,
        keep: int = 4,
        warmup: int | None = None,
        window: int = 200,
        detectors: DetectorSet | None = None,
        resume: bool = True,
        frozen: str | None = None,
        sinks: Sequence[Writer] = (),
        on_incident: Sequence[OnIncident] = (),
        on_events: Sequence[OnEvents] = (),
        act: bool = False,
        policy: Policy | None = None,
        ledger: CheckpointLedger | None = None,
        save: Save | None = None,
        restore: Restore | None = None,
        delete: Callable[[int], None] | None = None,
    ):
        """Opens or resumes the run's folder and builds what watches it.

        Args:
            folder: Such as "runs/a"; made where it is not there, gone on with where it is.
            params: Parameters of the model, real or abstract.
            config: What makes the run what it is; a folder with another one is refused.
            schedule: Learning rate, or a function of the step. It is recorded with each sample, and
                the warm-up is read off it.
            layout: Where the matrices lie; None: the monitor's, or `find_layout(params)`.
            monitor: What is measured how often; None: `Monitor(layout)`.
            keep: Snapshots in the ring, one each `monitor.delta` steps.
            warmup: Steps of learning-rate warm-up; None: from the schedule, else 100.
            window: Steps of the healthy window after it.
            detectors: What raises alarms; None: `standard_detectors` with this warm-up and window.
            resume: Whether a folder that holds a run already is gone on with, or refused.
            frozen: Regular expression of the paths of leaves that must not move, besides those that
                the optimizer leaves alone.
            sinks: Where samples go besides: TensorBoard, W&B, Prometheus, or your own `Writer`.
            on_incident: Called with (change, incident), on the first process.
            on_events: Called with what a sample led to, on every process.
            act: Whether the ladder is carried out; False: what it would do is written as advice.
            policy: How the ladder is climbed; its `act` is the argument's.
            ledger: Which checkpoints are trusted.
            save: Writes a training state: (step, state). None: Orbax does, below `folder`.
            restore: Returns the training state that was saved at a step.
            delete: Removes the checkpoint at a step; None: what `save` wrote is never removed.

        Raises:
            FileExistsError: The folder holds a run of another configuration.
            ValueError: One of `save` and `restore` without the other, or the layout is not found.
        """
        if (save is None) != (restore is None):
            raise ValueError(
                "expected both save=(step, state) -> None and restore=(step) -> state, got one; "
                "without either Orbax saves below the run's folder"
            )
        self.folder = Path(folder)
        if layout is None:
            layout = find_layout(params) if monitor is None else monitor.layout
        self.layout = layout
        self.layout.check(params)
        self.monitor = default_monitor(self.layout) if monitor is None else monitor
        self.step, self._keep, self._act = 0, keep, act
        warmup = warmup_of(schedule) if warmup is None else warmup
        policy = replace(Policy() if policy is None else policy, act=act)
        self.watcher = default_watcher(self.layout, warmup, window, detectors, policy, ledger)
        self.watcher.contracts = declared(params, frozen)
        agree("the configuration", dict(config or {}))
        log = RunLog.open(self.folder, dict(config or {}), resume=resume) if leads() else None
        sinks = tuple(sinks) if leads() else ()
        self.journal = Journal(log, sinks, self.watcher, schedule, on_incident, on_events)
        contracts, event = self.watcher.contracts, self.journal.event
        self.restores = Restores(self.folder / "digests", contracts, event)
        restore = self.restores.audited(restore)
        self.recovery = CarryingOut(
            self.folder, self.watcher, save, restore, change, self.journal.rewind, delete
        )
        self._beside = jax.jit(self.monitor, static_argnames="due")
        self._release: Callable[[], None] = lambda: None

    # In the optimizer and in the step.

    def transforms(self) -> Any:
        """Returns the transform to put behind the optimizer: `optax.chain(tx, watch.transforms())`.

        It holds the snapshot ring, the worst update between samples, and the learning-rate factor
        where the ladder acts.
        """
        ours: Any = import_module("optax_ext")
        control = (ours.scale_by_control(),) if self._act else ()
        selected = self.layout.selects("qk", "v", "o", "router")
        every = self.monitor.delta
        ring = (ours.track_delta(every, self._keep, select=selected),) if every else ()
        symptoms = self.monitor.symptoms
        worst = (ours.track_worst(symptoms),) if symptoms else ()
        return optax.chain(*control, *worst, *ring)

    def due(self, step: int, *tiers: str) -> tuple[str, ...]:
        """Returns the tiers that are sampled at `step`, a static argument of the jitted step.

        Args:
            step: The step.
            *tiers: Only these; none: all.
        """
        return tuple(x for x in self.monitor.due(step) if not tiers or x in tiers)

    def measure(
        self,
        step: Any,
        params: PyTree,
        opt_state: PyTree,
        intermediates: Any = None,
        *,
        due: Collection[str] | None = None,
        **seen: Any,
    ) -> Readings | None:
        """Returns what is due at `step`, before the update of that step.

        Inside a jitted step it is `Monitor.__call__`. Outside of one it is a program of its own:
        call it before the step; where nothing is due it returns None.

        Args:
            step: Updates applied so far.
            params: Parameters before the update.
            opt_state: Optimizer state before the update.
            intermediates: What left the forward pass; see `Monitor`.
            due: From `watch.due(step)`, static; None inside a jitted step: each tier under a
                conditional.
            **seen: `grads`, `updates`, `loss`, `batch`, `jacobian`, as of `Monitor`.
        """
        if _is_traced(step, params, opt_state):
            return self.monitor(step, params, opt_state, intermediates, due=due, **seen)
        due = self.due(int(step)) if due is None else tuple(due)
        if not due:
            return None
        step = np.int32(step)
        return self._beside(step, params, opt_state, intermediates, due=due, **seen)

    # On the host.

    def observe(self, step: int, *readings: Readings | None, **scalars: Any) -> None:
        """Takes what was measured at `step`, and scalars of the trainer's own.

        It does not wait for the device: a sample is written once its values have arrived. Only
        where the ladder acts, or with several processes, the sample of one step is written before
        the next but one begins, so that all see the same at the same step.

        Args:
            step: The step.
            *readings: From `measure`: in the step, beside it, or both.
            **scalars: `loss` (nats per token), `held_out`, `grad_norm`, `learning_rate`, `tokens`
                and any others. Arrays of the device are written where the symptoms are due, numbers
                of the host and `held_out` always.
        """
        step = int(step)
        found = [x for x in readings if x is not None]
        joined = reduce(operator.or_, found) if found else None
        self.journal.add(step, joined, scalars, due=bool(self.monitor.due(step)))
        self.step = step + 1
        strict = self._act or jax.process_count() > 1
        for seen in self.journal.write(before=step if strict else None):
            self.recovery.take(seen.step, seen.actions)

    def change(self, what: str = "data") -> None:
        """Declares that the data, batch or context change on purpose from the next step on.

        What is judged by its own past is learned anew; limits, and values that are not finite, are
        judged all the while. A longer context is seen where the residual stream is measured.

        Args:
            what: For the journal, such as "data".
        """
        self.journal.changed = self.step
        self.journal.event("change", self.step, what=what)

    def report(self) -> Path:
        """Writes `report.html` into the run's folder and returns its path.

        Raises:
            ImportError: Plotly is not installed: `pip install "stabmon[cli]"`.
        """
        self.flush()
        pages: Any = import_module("stabmon.output.report")
        return pages.write_report([self.folder], self.folder / "report.html")

    def __enter__(self) -> "Watch":
        self._release = termination.catch()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        self._release()
        try:
            if error is not None and jax.process_count() > 1:
                self.journal.drop()  # Another process may be gone: what waits never arrives.
            self.flush()
        finally:
            if error is not None:
                self.journal.event("ended", self.step, error=f"{type(error).__name__}: {error}")
            elif self.stopped:
                self.journal.event("stopped", self.step, code=EXIT_UNRECOVERED)
            self.journal.close()


def _is_traced(*trees: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))
