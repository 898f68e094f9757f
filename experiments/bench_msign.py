"""What does MSign cost, by which method, and how exact is it?

    python -m experiments.bench_msign            about 6 minutes on two cores
    python -m experiments.bench_msign --quick    small shapes and few rounds, to see that it runs

Ratios in one run on one machine: the methods of `matrix_sign` against an SVD and against the
Newton–Schulz iteration of `optax.contrib`; one application against a training step of the demo
model; the slowest step with and without staggering; floating-point operations at the LLaMA-1B and
Sigma-40M shapes of arXiv 2602.01734.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console

from experiments.loop.losses import next_token_loss
from experiments.support.timing import Row, as_table, interleaved
from models.config import GPTConfig
from models.gpt import apply, init_params
from models.presets import PRESETS
from optax_ext._msign import msign
from stabmon.linalg.sign import matrix_sign, orthogonality_error

DEMO = GPTConfig(context=48)
LLAMA, SIGMA = PRESETS["llama-1b"], PRESETS["sigma-40m-mha"]
TOKENS = 65_536
BOTH = ("attention", "mlp")


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        quick: Small shapes and few rounds only, to see that it runs.
    """

    quick: bool = False


def main(config: Config) -> list[Row]:
    """All rows, printed as a table."""
    rows = [*method_rows(config), *step_rows(config), *flop_rows(config)]
    Console().print(as_table("MSign", rows))
    return rows


def method_rows(config: Config) -> Iterator[Row]:
    """Speed against the SVD and ‖QᵀQ − I‖_max of each method, at a condition number of 1e4."""
    shapes = [(16, 48, 48), (16, 64, 64), (8, 64, 256), (4, 128, 128), (4, 128, 512)]
    if not config.quick:
        shapes += [(2, 256, 256), (2, 256, 1024), (1, 1024, 1024), (1, 1024, 4096), (1, 2048, 2048)]
    ways = {name: partial(matrix_sign, method=name) for name in ("newton_schulz", "polar", "svd")}
    for shape in shapes:
        w = _conditioned(*shape)
        candidates = {**ways, "optax": _optax_newton_schulz}
        compiled = {name: partial(jax.jit(f), w) for name, f in candidates.items()}
        rounds = 3 if config.quick or max(shape) > 1000 else 15
        seconds = interleaved(compiled, rounds)
        error = {name: float(jnp.max(orthogonality_error(run()))) for name, run in compiled.items()}
        text = ", ".join(
            f"{name} {seconds['svd'] / seconds[name]:.1f}× ({error[name]:.0e})"
            for name in candidates
            if name != "svd"
        )
        worst = max(error[name] for name in ways)
        yield Row(
            f"matrix_sign of {'×'.join(map(str, shape))}, SVD {1e3 * seconds['svd']:.1f} ms",
            "‖QᵀQ − I‖_max ≤ 1e-4",
            text,
            worst <= 1e-4,
        )


def _conditioned(count: int, rows: int, columns: int) -> jax.Array:
    """Matrices with singular values from 1 to 1e-4, evenly spaced on a log scale."""
    m, n = max(rows, columns), min(rows, columns)
    orthonormal = jax.jit(
        lambda key, k: jnp.linalg.qr(jax.random.normal(key, (count, k, n)))[0], static_argnums=1
    )
    u, v = (orthonormal(jax.random.key(i), k) for i, k in enumerate((m, n)))
    w = (u * jnp.geomspace(1, 1e-4, n)[None, None]) @ jnp.swapaxes(v, 1, 2)
    return w if m == rows else jnp.swapaxes(w, 1, 2)


def _optax_newton_schulz(w: jax.Array) -> Any:
    """Five quintic steps as Muon takes them."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    muon = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=axes)
    return muon.update(w, muon.init(w))[0]


def step_rows(config: Config) -> Iterator[Row]:
    """Trainings of the demo model in lockstep, with and without MSign in the chain."""
    rounds = 20 if config.quick else 200
    never, every = 10**6, 1
    chains = {
        "base": [],
        "told": [msign(every, BOTH)],
        "idle": [msign(never, BOTH)],
        "attention": [msign(every, "attention")],
        "both": [msign(every, BOTH)],
        "triggered": [msign(every, BOTH, trigger=0.5)],
    }
    due = {"told": False}
    trainers = {name: _trainer(DEMO, 16, chain, due.get(name)) for name, chain in chains.items()}
    base, cost = _extra_cost(trainers, rounds)
    for name, what, target in (
        ("attention", "attention", 0.5),
        ("both", "attention and MLP", 1.0),
    ):
        yield Row(
            f"one application, {what}, demo model (base step {1e3 * base:.1f} ms)",
            f"≤ {target} base steps",
            f"{cost[name]:.2f} base steps",
            cost[name] <= target,
        )
    yield Row("one check with trigger=, nothing to do", "", f"{cost['triggered']:.2f} base steps")
    between = {"one program": cost["idle"], "msign_due= from outside": cost["told"]}
    for way, share in between.items():
        told = way != "one program"
        amortised = max(share, 0) + cost["both"] / 100
        yield Row(
            f"MSign amortised at P=100, attention and MLP, {way}",
            "≤ 1 %" if told else "",
            f"{100 * amortised:.2f} % (a step between applications: {100 * share:+.1f} %)",
            amortised <= 1e-2 if told else None,
        )
    yield from _jitter_rows(config)
    if not config.quick:
        yield _larger_row()


def _larger_row() -> Row:
    """The Sigma-40M shape, with as few tokens a step as two cores bear."""
    model, batch = replace(SIGMA, context=512), 2
    trainers = {
        "base": _trainer(model, batch, []),
        "both": _trainer(model, batch, [msign(1, BOTH)]),
    }
    base, costs = _extra_cost(trainers, 5)
    cost = costs["both"]
    return Row(
        f"one application, attention and MLP, Sigma-40M shape, {batch * model.context:,} tokens a "
        f"step ({1e3 * base:.0f} ms)",
        "",
        f"{cost:.2f} base steps; {cost:.2f} % amortised at P=100",
    )


def _extra_cost(
    trainers: dict[str, Callable[[], Any]], rounds: int
) -> tuple[float, dict[str, float]]:
    """Median seconds of "base", and what each takes beyond it, in base steps.

    The median of ratios within a round, in turning order: the machine's slow drift cancels.
    """
    names = list(trainers)
    for name in names:
        jax.block_until_ready(trainers[name]())
    seconds = {name: np.zeros(rounds) for name in names}
    for i in range(rounds):
        for j in range(len(names)):
            name = names[(i + j) % len(names)]
            start = time.perf_counter()
            jax.block_until_ready(trainers[name]())
            seconds[name][i] = time.perf_counter() - start
    ratio = {name: float(np.median(seconds[name] / seconds["base"])) - 1 for name in names}
    return float(np.median(seconds["base"])), ratio


def _jitter_rows(config: Config) -> Iterator[Row]:
    """Due steps against the others at P=100; a step is due where the state changed."""
    count = 24
    for stagger in (False, True):
        period = 20 if config.quick else 100
        train_one = _trainer(DEMO, 16, [msign(period, BOTH, stagger=stagger)])
        jax.block_until_ready(train_one())
        due, others = [], []
        for step in range(2, (2 if config.quick else 6) * period + 1):
            start = time.perf_counter()
            state = jax.block_until_ready(train_one())
            seconds = time.perf_counter() - start
            restored = bool(np.any(np.asarray(state[-1].msign_last) == step))
            (due if restored else others).append(seconds)
        ratio = float(np.median(due) / np.median(others)) if others else float("nan")
        yield Row(
            f"slowest step, stagger={stagger}, P={period}, {count} matrices",
            "≤ 1.15 × median" if stagger else "",
            f"{ratio:.2f} × median ({len(due)} due steps, {len(others)} others)",
            ratio <= 1.15 if stagger else None,
        )


def _trainer(
    model: GPTConfig, batch: int, chain: list[Any], due: bool | None = None
) -> Callable[[], Any]:
    """A function that takes one more training step and returns the optimizer state."""
    told = {} if due is None else {"msign_due": due}
    tx = optax.chain(optax.adamw(1e-3), *chain)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 256, (batch, model.context + 1), dtype=np.int32))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        loss = lambda params: next_token_loss(apply(model, params, tokens[:, :-1]), tokens[:, 1:])
        updates, state = tx.update(jax.grad(loss)(params), state, params, **told)
        return optax.apply_updates(params, updates), state

    params = init_params(model, 0)
    held = [params, tx.init(params)]

    def train_one():
        held[:] = step(*held)
        return held[1]

    return train_one


def flop_rows(config: Config) -> Iterator[Row]:
    """One application against one step of 65,536 tokens, the step's by XLA's cost analysis."""
    for name, model in (("Sigma-40M", SIGMA), ("LLaMA-1B", LLAMA)):
        step = _step_flops(model)
        for select, what in (("attention", "attention"), (BOTH, "attention and MLP")):
            share = {m: _msign_flops(model, select, m) / step for m in ("newton_schulz", "polar")}
            target = 0.15 if name == "LLaMA-1B" else None
            yield Row(
                f"one application by FLOPs, {what}, {name} shape, {TOKENS:,} tokens a step",
                "" if target is None else f"≤ {target} steps",
                ", ".join(f"{method} {value:.3f}" for method, value in share.items()),
                None if target is None else share["newton_schulz"] <= target,
            )


def _step_flops(model: GPTConfig) -> float:
    """Forward and backward of `TOKENS` tokens; linear in layers, so from one and two of them."""

    def of(layers: int) -> float:
        shape = replace(model, layers=layers, unroll=layers)
        params = jax.eval_shape(lambda: init_params(shape, 0))
        tokens = jax.ShapeDtypeStruct((1, model.context), jnp.int32)
        loss = lambda params, tokens: next_token_loss(apply(shape, params, tokens), tokens)
        analysis = jax.jit(jax.grad(loss)).lower(params, tokens).cost_analysis()
        assert analysis is not None, "this backend counts no operations"
        return analysis["flops"]

    one, two = of(1), of(2)
    return (one + (model.layers - 1) * (two - one)) * TOKENS / model.context


def _msign_flops(model: GPTConfig, select: Any, method: str) -> float:
    """One application, from one layer."""
    params = jax.eval_shape(lambda: init_params(replace(model, layers=1), 0))
    tx = msign(1, select, method)
    state = jax.eval_shape(tx.init, params)
    return _flops(jax.make_jaxpr(tx.update)(params, state, params).jaxpr) * model.layers


def _flops(jaxpr: Any) -> float:
    """Of products, Cholesky factors and solves on a CPU, loops as often as they run."""
    total = 0.0
    for equation in jaxpr.eqns:
        name, given = equation.primitive.name, equation.params
        shapes = [x.aval.shape for x in equation.invars if hasattr(x.aval, "shape")]
        out = equation.outvars[0].aval
        if name == "dot_general":
            (contracted, _), _ = given["dimension_numbers"]
            total += 2 * math.prod(out.shape) * math.prod(shapes[0][i] for i in contracted)
        elif name == "cholesky":
            total += math.prod(out.shape) * out.shape[-1] / 3
        elif name == "triangular_solve":
            total += math.prod(out.shape) * shapes[0][-1]
        elif name == "cond":
            each = [_flops(x.jaxpr) for x in given["branches"]]
            platforms = given.get("branches_platforms") or ()
            here = [x for x, on in zip(each, platforms, strict=False) if on and "cpu" in on]
            total += max(here or each)
        else:
            inner = [getattr(x, "jaxpr", x) for x in given.values()]
            inside = sum(_flops(x) for x in inner if hasattr(x, "eqns"))
            total += inside * given.get("length", 1)
    return total


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
