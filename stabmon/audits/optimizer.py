"""`optimizer`: what an update is made of, recomputed in float64 from state and gradient.

It reads Adam's moments where the state has them; of other optimizers frozen leaves and counters.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from stabmon.audits.case import Case, Outcome, Verdict, acquitted, undecided, value_of
from stabmon.layout.paths import leaves_with_paths

NAME = "optimizer"
# Entries of each leaf that are recomputed.
_SAMPLE = 4096
_RATE, _DECAY = 0.02, 0.1


class _Part(NamedTuple):
    """Least squares of one leaf's update: −rate · (direction + decay · w)."""

    path: str
    rate: float
    decay: float
    rest: float


def optimizer(case: Case) -> Verdict:
    """Whether the update is the one that its state and gradient call for.

    For a sample of entries of each leaf Adam's direction d = m̂ / (√v̂ + ε) is formed in float64
    from the moments after the step, and the update is fitted by −η (d + λ w). It convicts of leaves
    that do not move though they have a gradient, of moments that are empty after many steps, of
    counters that differ from `step`, of a rate η that is not the schedule's, of a decay λ that is
    not `case.decay` or not where `case.decayed` says, of norms that decay while matrices do not,
    and of an ε that is larger than √v̂.

    Args:
        case: Its loss, params, batch, tx and opt_state; step, schedule, decay, decayed and frozen
            where they are known.
    """
    if case.tx is None or case.opt_state is None:
        return undecided(NAME, "needs tx and opt_state")
    counters = dict(_counters(case.opt_state))
    late = {path: count for path, count in counters.items() if count != case.step}
    if (late and len({*counters.values()}) > 1) or (late and case.step):
        path, count = next(iter(late.items()))
        return _convict(
            f"counter {path} is at {count:,}, the run at {case.step:,}", "counter", path
        )
    grads, updates, after = _step(case.loss, case.tx, case.params, case.batch, case.opt_state)
    grads, updates, params = (dict(leaves_with_paths(x)) for x in (grads, updates, case.params))
    read = lambda tree: {path: np.asarray(_few(x), np.float64) for path, x in tree.items()}
    g, u, w = read(grads), read(updates), read(params)
    free = {path for path in g if case.frozen is None or not case.frozen(path, params[path])}
    still = [path for path in free if not u[path].any() and g[path].any()]
    said: Any = case.schedule(case.step) if callable(case.schedule) else case.schedule
    rate = None if said is None else float(said)
    if still and (rate is None or rate > 0) and len(still) < len(free):
        return _convict(f"{min(still)} has a gradient and does not move", "frozen leaf", min(still))
    adam = _find_adam(after)
    if adam is None:
        return undecided(NAME, "only Adam's moments are read; counters and frozen leaves are right")
    before = _find_adam(case.opt_state)
    empty = before is not None and not any(
        np.any(np.asarray(x)) for x in jax.tree.leaves(before.nu)
    )
    if empty and case.step > 10:
        return _convict(f"the second moments are zero after {case.step:,} steps", "lost moments")
    return _judge(case, adam, g, u, w, free, rate)


@partial(jax.jit, static_argnames=("loss", "tx"))
def _step(loss: Any, tx: Any, params: PyTree, batch: Any, opt_state: PyTree) -> Any:
    grads = jax.grad(lambda w: value_of(loss(w, batch)))(params)
    updates, after = tx.update(grads, opt_state, params)
    return grads, updates, after


def _few(x: Any) -> Any:
    """Entries of a leaf that are looked at, evenly spread."""
    return x.reshape(-1)[:: max(1, x.size // _SAMPLE)]


def _find_adam(state: PyTree) -> Any:
    """The first state with first and second moments."""
    is_adam = lambda x: hasattr(x, "mu") and hasattr(x, "nu") and hasattr(x, "count")
    return next(filter(is_adam, jax.tree.leaves(state, is_leaf=is_adam)), None)


def _counters(state: PyTree) -> list[tuple[str, int]]:
    named = [(path, x) for path, x in leaves_with_paths(state) if path.split("/")[-1] == "count"]
    return [(path, int(x)) for path, x in named if np.ndim(x) == 0]


def _judge(
    case: Case, adam: Any, g: Any, u: Any, w: Any, free: set[str], rate: float | None
) -> Verdict:
    mu, nu = dict(leaves_with_paths(adam.mu)), dict(leaves_with_paths(adam.nu))
    known = [path for path in g if path in free and path in mu and path in nu and u[path].any()]
    if not known or rate == 0:
        return undecided(NAME, "no update to take apart: the rate is 0, or nothing moves")
    first, second = (np.asarray(_few(x[known[0]]), np.float64) for x in (mu, nu))
    count = int(adam.count)
    betas = _betas(case, known[0], first, second, g[known[0]])
    parts, small = [], []
    for path in known:
        m = np.asarray(_few(mu[path]), np.float64) / (1 - betas[0] ** count)
        v = np.asarray(_few(nu[path]), np.float64) / (1 - betas[1] ** count)
        root = np.sqrt(np.maximum(v, 0))
        seen = g[path] != 0
        if seen.any():
            small.append(float(np.median(root[seen])))
        parts.append(_fit(path, m / (root + 1e-8), w[path], u[path]))
    rates = np.array([part.rate for part in parts])
    decays = {part.path: part.decay for part in parts}
    usual = float(np.median(rates))
    numbers = {"rate": usual, "decay": max(decays.values()), "root v": float(np.median(small))}
    numbers["rest"] = float(np.median([part.rest for part in parts]))
    if np.median(small) < 1e-8:
        return _convict("√v is below ε: updates shrink with the gradient", "scale", **numbers)
    if numbers["rest"] > 0.1:
        return undecided(NAME, "the update is not Adam's with ε = 1e-8", **numbers)
    if rate is not None and abs(usual / rate - 1) > _RATE:
        numbers["schedule"] = rate
        return _convict(
            f"updates are as of a rate of {usual:.3g}, the schedule says {rate:.3g}",
            "rate",
            **numbers,
        )
    if case.decay is not None:
        for path, found in decays.items():
            meant = (
                case.decay
                if case.decayed is None
                else case.decay * case.decayed(path, case_leaf(case, path))
            )
            skip = case.decayed is None and abs(found) < _DECAY * case.decay
            if not skip and abs(found - meant) > _DECAY * case.decay:
                text = f"{path} decays by {found:.3g}, not {meant:.3g}"
                return _convict(text, "decay", path, **numbers)
    axes = {path: np.ndim(x) for path, x in leaves_with_paths(case.params)}
    large = 1e-3
    vectors = [p for p in decays if _is_scale(p) and decays[p] > large]
    matrices = [p for p in decays if not _is_scale(p) and axes[p] > 1 and decays[p] > large]
    if vectors and not matrices:
        text = f"{vectors[0]} decays and no matrix does: the mask is the wrong way round"
        return _convict(text, "decay", vectors[0], **numbers)
    off = [part for part in parts if abs(part.rate / usual - 1) > 0.5]
    if off and rate is not None and case.frozen is None and len(off) < len(parts) / 4:
        numbers["leaf rate"] = off[0].rate
        text = f"{off[0].path} has a rate of its own, {off[0].rate:.3g} for {usual:.3g}"
        return undecided(NAME, text, **numbers)
    return acquitted(NAME, f"updates are Adam's at a rate of {usual:.3g}", **numbers)


def case_leaf(case: Case, path: str) -> Any:
    """Returns the parameter at a path."""
    return dict(leaves_with_paths(case.params))[path]


def _is_scale(path: str) -> bool:
    return any(name in path.lower() for name in ("scale", "norm", "bias", "ln_"))


def _betas(case: Case, path: str, mu: Any, nu: Any, g: Any) -> tuple[float, float]:
    """β₁ and β₂ from the moments before and after the step, by least squares."""
    before = _find_adam(case.opt_state)
    old = [
        np.asarray(_few(dict(leaves_with_paths(x))[path]), np.float64)
        for x in (before.mu, before.nu)
    ]
    found = []
    for new, was, term in ((mu, old[0], g), (nu, old[1], g * g)):
        # new − term = β (was − term)
        a, b = was - term, new - term
        found.append(float(a @ b / max(a @ a, 1e-300)))
    return min(max(found[0], 0.0), 1 - 1e-9), min(max(found[1], 0.0), 1 - 1e-9)


def _fit(path: str, d: Any, w: Any, u: Any) -> _Part:
    """Rate, decay over rate, and what is left of the update."""
    columns = np.stack([d, w], axis=1)
    scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    found, *_ = np.linalg.lstsq(columns / scale, -u, rcond=1e-9)
    a, b = found / scale
    rest = np.linalg.norm(u + columns @ (found / scale)) / max(np.linalg.norm(u), 1e-300)
    return _Part(path, float(a), float(b / a) if a else 0.0, float(rest))


def _convict(sentence: str, cause: str, path: str | None = None, **numbers: float) -> Verdict:
    return Verdict(NAME, Outcome.CONVICTED, sentence, cause, numbers, path)
