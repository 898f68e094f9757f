"""Which of the faults that people published does a contract convict, where, and how soon?

    python -m experiments.real_faults            about 5 minutes on two cores
    python -m experiments.real_faults --only "zeros written"

Question: each fault of a real run that breaks an exact relation and has a form on a CPU is planted
in a small mixture of experts. Which contract is broken, in which leaf, after how many samples? And
is none broken in the same run without a fault, with the optimizers that people use?

Rows: `references/real_faults.jsonl`. Results: `experiments/README.md`.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import tyro

import stabmon
from experiments.support.mini import init_mini
from experiments.support.published import CLEAN, EVERY, FAULTS, RATE, Plan, lost
from experiments.support.tables import listing
from stabmon.contracts import Contracts, Verdict, digest
from stabmon.contracts.restore import compared, state_digest

ROWS = Path(__file__).parent / "references" / "real_faults.jsonl"


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        only: Faults whose name holds this; empty: all.
        samples: Samples of each run, one each two steps.
        save: Whether rows are written to the results.
    """

    only: str = ""
    samples: int = 12
    save: bool = True


@dataclass(frozen=True)
class Row:
    """What became of one plan: the first verdict of its contract, and others besides."""

    fault: str
    source: str
    contract: str
    leaf: str
    samples: int | None
    others: int
    seconds: float


def trained(plan: Plan, samples: int) -> list[Verdict]:
    """The verdicts on a run."""
    params = plan.init()
    layout, state = stabmon.find_layout(params), plan.tx.init(params)
    judge, verdicts, forms = Contracts.declared(plan.frozen), [], []

    @jax.jit
    def step_fn(step, params, state, tokens):
        loss, grads = jax.value_and_grad(plan.loss)(params, tokens)
        grads = plan.grads(step, grads)
        updates, new = plan.tx.update(grads, state, params)
        row, form = digest(layout, params, state, grads, updates, loss, tokens)
        forms.append(form)
        return optax.apply_updates(params, updates), new, row

    for step in range(samples * EVERY):
        params, state = plan.change(step, params, state)
        params, state, row = step_fn(step, params, state, plan.batch(step))
        if step % EVERY == 0:
            rates = float(plan.rate(step)), float(plan.rate(max(step - 1, 0)))
            verdicts += judge.observe(step, row, forms[0], *rates)[1]
    return verdicts


def restores() -> Iterator[tuple[str, str, str, dict[str, str], float]]:
    """(fault, source, leaf, what the audit says, seconds)."""
    params = init_mini()
    tx = optax.adamw(RATE)
    grads = jax.tree.map(jnp.ones_like, params)
    opt = tx.update(grads, tx.init(params), params)[1]
    state = {"params": params, "opt": opt, "key": jax.random.key(0)}
    saved = state_digest(state)
    for fault, source, leaf, loaded in lost(state):
        begun = time.perf_counter()
        found = compared(saved, state_digest(loaded))
        yield fault, source, leaf, found, time.perf_counter() - begun


def main(config: Config) -> list[Row]:
    """The rows, printed as a table and kept."""
    rows = []
    for name, plan in (FAULTS | CLEAN).items():
        if config.only in name:
            begun = time.perf_counter()
            verdicts = trained(plan, config.samples)
            seconds = time.perf_counter() - begun
            own = [x for x in verdicts if x.contract == plan.contract]
            own = [x for x in own if x.leaf.startswith(plan.leaf) or not plan.leaf]
            first = own[0] if own else None
            samples = None if first is None else (first.step - plan.onset) // EVERY + 1
            leaf = "" if first is None else first.leaf
            others = len([x for x in verdicts if x.contract != plan.contract])
            rows.append(Row(name, plan.source, plan.contract, leaf, samples, others, seconds))
    for fault, source, leaf, found, seconds in restores():
        if config.only in fault:
            named = leaf if leaf in found else ""
            others = len([x for x in found if x != leaf])
            rows.append(Row(fault, source, "restore", named, 1 if named else None, others, seconds))
    print(listing([asdict(row) | {"seconds": f"{row.seconds:.1f}"} for row in rows]))
    if config.save and not config.only:
        ROWS.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return rows


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main(tyro.cli(Config))
