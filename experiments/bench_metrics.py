"""What do the spectral monitors cost, and how exact are they?

    python -m experiments.bench_metrics cores      about 5 minutes on two cores
    python -m experiments.bench_metrics monitor    about 2

Ratios in one run on one machine: the compressed core of Δ2 against the SVD of the D×D product,
against other ways to the same core, and the monitor's share of a training step.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

import optax_ext
import stabmon
from experiments.attention_fault import MODEL
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig, make_step
from experiments.support.timing import Row, as_table, interleaved
from models.gpt import apply, init_params
from stabmon.linalg.power import power_norm
from stabmon.linalg.products import product
from stabmon.metrics.qk import increment_spectra, qk_increment
from stabmon.metrics.spectrum import spectral_norm, spectrum_stats


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        part: The spectral cores, or the monitor inside a training step.
        quick: Small shapes and few rounds only, to see that it runs.
    """

    part: Annotated[Literal["cores", "monitor"], tyro.conf.Positional] = "cores"
    quick: bool = False


def main(config: Config) -> list[Row]:
    """The rows of one part, printed as a table."""
    cores, monitor = (core_rows, accuracy_rows, norm_rows), (compile_rows, monitor_rows)
    parts = {"cores": cores, "monitor": monitor}
    rows = [row for measure in parts[config.part] for row in measure(config)]
    Console().print(as_table(f"Metrics: {config.part}", rows))
    return rows


def head(size: int, width: int, relative: float, rank: int | None = None) -> tuple[jax.Array, ...]:
    """q0, k0, dq, dk of one Gaussian head with ‖dW‖/‖W‖ = `relative`, dW of the given rank."""
    keys = jax.random.split(jax.random.key(size), 4)
    q, k = (jax.random.normal(key, (size, width)) for key in keys[:2])

    def change(key):
        if rank is None:
            return relative * jax.random.normal(key, (size, width))
        left, right = jax.random.split(key)
        thin = jax.random.normal(left, (size, rank)) @ jax.random.normal(right, (rank, width))
        return relative * thin / rank**0.5

    return q, k, change(keys[2]), change(keys[3])


def full_delta2(q, k, dq, dk):
    """Δ2's spectrum by forming the D×D product."""
    return spectrum_stats(jnp.linalg.svd(dq @ k.T + q @ dk.T, compute_uv=False))


def core_delta2(q, k, dq, dk):
    """Δ2's spectrum as the library takes it."""
    return spectrum_stats(increment_spectra(q, k, dq, dk).delta2)


def householder_delta2(q, k, dq, dk):
    """Δ2's spectrum through Householder QR of both factors."""
    r = jnp.linalg.qr(jnp.hstack([dq, q]), mode="r")
    s = jnp.linalg.qr(jnp.hstack([k, dk]), mode="r")
    return spectrum_stats(jnp.linalg.svd(r @ s.T, compute_uv=False))


def gram_delta2(q, k, dq, dk):
    """Δ2's spectrum through the two Gram matrices; loses digits below √eps."""
    a, b = jnp.hstack([dq, q]), jnp.hstack([k, dk])
    values, vectors = jnp.linalg.eigh(product(a.T, a))
    half = vectors * jnp.sqrt(jnp.maximum(values, 0))[None, :]
    square = product(half.T, product(product(b.T, b), half))
    return spectrum_stats(jnp.sqrt(jnp.maximum(jnp.linalg.eigvalsh(square), 0)))


def core_rows(config: Config) -> Iterator[Row]:
    """Speed of the core against the full SVD and against other factorisations."""
    shapes = [(512, 32, None)] if config.quick else [(1024, 64, None), (2048, 64, 200.0)]
    shapes += [] if config.quick else [(4096, 128, 400.0)]
    for size, width, target in shapes:
        for rank, kind in ((None, "full rank"), (1, "rank one")):
            if rank == 1 and target is None:
                continue
            arrays = head(size, width, 1e-3, rank)
            run = lambda f, arrays=arrays: _call(jax.jit(f), arrays)
            ways = {"core": core_delta2, "Householder": householder_delta2, "Gram": gram_delta2}
            times = interleaved({name: run(f) for name, f in ways.items()}, 31)
            full = interleaved({"full": run(full_delta2)}, 1 if size > 2048 else 3)["full"]
            ratio = {name: full / seconds for name, seconds in times.items()}
            others = ", ".join(f"{name} {ratio[name]:.0f}×" for name in ("Householder", "Gram"))
            yield Row(
                f"Δ2 of one head, D={size}, H={width}, dW of {kind}, against the full SVD",
                "" if target is None else f"≥ {target:.0f}×",
                f"{ratio['core']:.0f}× ({others})",
                None if target is None else ratio["core"] >= target,
            )


def _call(f: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> Callable[[], Any]:
    return lambda: f(*arrays)


def accuracy_rows(config: Config) -> Iterator[Row]:
    """Error of all three increments against float64, from large to tiny changes."""
    size, width = (256, 32) if config.quick else (768, 64)
    worst = {2: 0.0, 1: 0.0}
    for relative in (1e-1, 1e-3, 1e-6):
        for rank in (None, 1):
            q, k, dq, dk = head(size, width, relative, rank)
            q1, k1 = q + dq, k + dk
            got = jax.jit(qk_increment)(q, k, q1, k1)
            for stats, sigma in zip(got, _exact(q, k, q1, k1), strict=True):
                modes, effective = (np.exp(_entropy(sigma, alpha)) for alpha in (2, 1))
                worst[2] = max(worst[2], abs(float(stats.modes) / modes - 1))
                worst[1] = max(worst[1], abs(float(stats.effective_rank) / effective - 1))
    for alpha, target in ((2, 1e-4), (1, 1e-3)):
        yield Row(
            f"worst relative error of Δ1, Δ2, Δ3 against float64, α={alpha}, ‖dW‖/‖W‖ 1e-1…1e-6",
            f"≤ {target:.0e}",
            f"{worst[alpha]:.1e}",
            worst[alpha] <= target,
        )


def _exact(*arrays: jax.Array) -> list[np.ndarray]:
    q, k, q1, k1 = (np.asarray(x, np.float64) for x in arrays)
    dq, dk = q1 - q, k1 - k
    products = (q1 @ k1.T - q @ k.T, dq @ k.T + q @ dk.T, dq @ dk.T)
    return [np.linalg.svd(x, compute_uv=False) for x in products]


def _entropy(sigma: np.ndarray, alpha: int) -> float:
    p = (sigma / sigma[0]) ** alpha
    p = p[p > 0] / p.sum()
    return float(-(p * np.log(p)).sum())


def norm_rows(config: Config) -> Iterator[Row]:
    """Power iteration against the SVD."""
    size = 256 if config.quick else 1024
    w = jax.random.normal(jax.random.key(0), (size, size))
    power, exact = jax.jit(lambda x: power_norm(x).value), jax.jit(spectral_norm)
    times = interleaved({"power": lambda: power(w), "svd": lambda: exact(w)}, 3)
    error = abs(float(power(w)) / float(exact(w)) - 1)
    yield Row(
        f"σ₁ of a Gaussian {size}×{size} by power iteration, against the SVD",
        "",
        f"{times['svd'] / times['power']:.0f}×, relative error {error:.1e}",
    )


def compile_rows(config: Config) -> Iterator[Row]:
    """Seconds to compile everything the monitor measures, on stacked trees of 2 and 24 layers."""
    seconds = {}
    for layers in (2, 2, 24):  # the first fills caches that have nothing to do with the depth
        model = replace(MODEL, layers=layers, model=128, experts=4)
        params = jax.eval_shape(lambda model=model: init_params(model, 0))
        layout = stabmon.find_layout(params)
        ring = optax_ext.track_delta(50, 4, select=layout.selects("qk", "v", "o", "router"))
        monitor = stabmon.Monitor(layout, detail="full")
        tokens = jax.ShapeDtypeStruct((4, model.context), jnp.int32)

        def measure(params, state, tokens, model=model, monitor=monitor):
            capture = lambda: apply(model, params, tokens, capture=True)[1]
            return monitor(0, params, state, capture, grads=params, updates=params, loss=0.0)

        lowered = jax.jit(measure).lower(params, jax.eval_shape(ring.init, params), tokens)
        start = time.perf_counter()
        lowered.compile()
        seconds[layers] = time.perf_counter() - start
    yield Row(
        "compiling all tiers of a full monitor, MoE of 24 layers, stacked",
        "≤ 15 s",
        f"{seconds[24]:.1f} s (2 layers: {seconds[2]:.1f} s)",
        seconds[24] <= 15,
    )


def monitor_rows(config: Config) -> Iterator[Row]:
    """The monitor's share of a step of the demo model, three trainings in lockstep.

    "with": one program whose tiers stand under `lax.cond`; "due": what is due is measured outright,
    symptoms within the step and the rest beside it, as the training loop does; "without": no
    monitor. Steps are told apart by the tiers that were due, and the amortised share weighs the
    median of each kind by its frequency.
    """
    default = MonitorConfig(delta=50, activations=100, weights=500, symptoms=10)
    cadences = {"delta": 50, "activations": 100, "weights": 500, "symptoms": 10}
    trainers = {plan: _trainer(default, plan) for plan in ("without", "with", "due")}
    seconds: dict[str, dict[tuple[str, ...], list[float]]] = {plan: {} for plan in trainers}
    rng = np.random.default_rng(0)
    first = 200 if config.quick else 500
    for step in range(first + (100 if config.quick else 3000)):
        kind = tuple(name for name, every in cadences.items() if step % every == 0)
        # In random order: whoever follows another finds its caches cold.
        for plan in rng.permutation(list(trainers)):
            start = time.perf_counter()
            trainers[plan](step)
            if step >= first:
                seconds[plan].setdefault(kind, []).append(time.perf_counter() - start)
    base = float(np.median([x for times in seconds["without"].values() for x in times]))
    names = {"with": "one program, lax.cond", "due": "programs of its own"}
    targets = {"with": ("", ""), "due": ("≤ 0.5 %", "≤ 1 %")}
    for plan, name in names.items():
        median = {kind: float(np.median(x)) / base for kind, x in seconds[plan].items()}
        count = {kind: len(x) for kind, x in seconds[plan].items()}
        share = median[()] - 1
        wanted = plan == "due"  # what the training loop does
        yield Row(
            f"monitor, unsampled step, {name}",
            targets[plan][0],
            f"{share:+.2%}",
            share <= 5e-3 if wanted else None,
        )
        amortised = sum(count[kind] * median[kind] for kind in count) / sum(count.values()) - 1
        kinds = sorted((kind for kind in count if kind), key=len)
        detail = ", ".join(f"{'+'.join(kind)} {median[kind]:.2f}" for kind in kinds)
        yield Row(
            f"monitor, amortised at default cadence, {name}",
            targets[plan][1],
            f"{amortised:+.2%} (in steps: {detail})",
            amortised <= 1e-2 if wanted else None,
        )


def _trainer(monitor: MonitorConfig, plan: str) -> Callable[[int], None]:
    """A function that takes the next training step of the demo model and waits for it.

    Which program: "without" the monitor, the one "with" conditionals, or that for what is "due".
    """
    init, step, watch = make_step(MODEL, OptimizerConfig(), monitor, None)
    tokens = np.random.default_rng(0).integers(0, 256, (16, MODEL.context + 1), dtype=np.int32)
    holder = [init(0)]

    def train_one(at: int) -> None:
        due = {"without": (), "with": None, "due": watch.due(at)}[plan]
        holder[0], readings, loss = step(holder[0], tokens, np.float32(0), due=due)
        jax.block_until_ready((holder[0], readings, loss))

    return train_one


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
