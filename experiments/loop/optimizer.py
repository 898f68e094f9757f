"""The optimizer chain of a training run, from its configuration."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

import optax_ext
import stabmon
from experiments.faults import scale_by_argument
from stabmon.layout.paths import path_name


@dataclass(frozen=True)
class MsignConfig:
    """Options of `optax_ext.msign`, by the same names."""

    period: int = 100
    select: tuple[str, ...] = ("attention",)
    method: Literal["auto", "svd", "polar", "newton_schulz"] = "auto"
    stagger: bool = False
    trigger: float | None = None
    blend: float = 1.0


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, what may follow it, and the snapshot ring behind both.

    Attributes:
        learning_rate: Peak learning rate.
        warmup: Steps of linear warm-up.
        schedule: What follows: "constant"; "linear" or "cosine" down to `floor`; "wsd", constant
            for four fifths of `decay` and then linear to `floor`; "restart", two cosines one after
            the other; "step", a third from half of `decay` on.
        decay: Steps of the schedule after the warm-up; None: ten warm-ups.
        floor: Where the schedule ends, as a fraction of the peak.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        weight_decay: On block matrices only.
        clip: Global gradient norm; None: no clipping.
        every: Steps between snapshots of the query and key matrices, and the router.
        keep: Snapshots kept.
        control: Whether the learning rate can be scaled while the run goes on.
        msign: Periodic matrix-sign restoration; None: none.
        rates: Peak learning rates of groups of the layout ("attention", "mlp", "all", a role),
            as pairs (group, rate), the groups disjoint; `learning_rate` is for all other leaves.
        base: "muon" for `optax.contrib.muon` on the block matrices of a "mha" model, its updates
            scaled to AdamW's RMS so that the same rates apply, and AdamW on the rest; "lion",
            "adafactor", "sgd" with momentum, or "schedule-free" AdamW.
        qk_clip: Largest attention logit that `optax_ext.qk_clip` allows; None: any.
    """

    learning_rate: float = 1e-3
    warmup: int = 100
    schedule: Literal["constant", "linear", "cosine", "wsd", "restart", "step"] = "constant"
    decay: int | None = None
    floor: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float | None = None
    every: int = 50
    keep: int = 4
    control: bool = False
    msign: MsignConfig | None = None
    rates: tuple[tuple[str, float], ...] = ()
    base: Literal["adamw", "muon", "lion", "adafactor", "sgd", "schedule-free"] = "adamw"
    qk_clip: float | None = None


def make_optimizer(config: OptimizerConfig, layout: stabmon.Layout, scaled: bool = False) -> Any:
    """The chain: clip → AdamW or Muon → learning-rate factor → QK-clip → MSign → snapshot ring.

    Where it is `scaled`, the base's updates are multiplied by `tx.update`'s argument `rate_scale`.
    """
    schedule = make_schedule(config)
    base = _with_rates(_make_base(config, schedule, layout), config, layout)
    return optax.chain(
        optax.identity() if config.clip is None else optax.clip_by_global_norm(config.clip),
        optax.chain(base, scale_by_argument()) if scaled else base,
        optax_ext.scale_by_control() if config.control else optax.identity(),
        *([] if config.qk_clip is None else [optax_ext.qk_clip(config.qk_clip, layout=layout)]),
        make_msign(config.msign, layout),
        optax_ext.track_delta(
            config.every, config.keep, select=layout.selects("qk", "v", "o", "router")
        ),
    )


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """The learning rate of a step."""
    peak, steps = config.learning_rate, config.decay or 10 * config.warmup
    end, half = peak * config.floor, steps // 2
    after = {
        "constant": [(0, optax.constant_schedule(peak))],
        "linear": [(0, optax.linear_schedule(peak, end, steps))],
        "cosine": [(0, optax.cosine_decay_schedule(peak, steps, config.floor))],
        "wsd": [
            (0, optax.constant_schedule(peak)),
            (steps * 4 // 5, optax.linear_schedule(peak, end, steps - steps * 4 // 5)),
        ],
        "restart": [
            (at, optax.cosine_decay_schedule(peak, half, config.floor)) for at in (0, half)
        ],
        "step": [(0, optax.constant_schedule(peak)), (half, optax.constant_schedule(peak / 3))],
    }[config.schedule]
    return optax.join_schedules(
        [optax.linear_schedule(0.0, peak, config.warmup), *(x for _, x in after)],
        [config.warmup + at for at, _ in after],
    )


def _make_base(config: OptimizerConfig, schedule: optax.Schedule, layout: stabmon.Layout) -> Any:
    """The optimizer itself, weight decay on block matrices only."""
    matrices = layout.selects("all")
    decayed = lambda params: stabmon.selection(params, matrices)
    match config.base:
        case "lion":
            return optax.lion(schedule, weight_decay=config.weight_decay, mask=decayed)
        case "adafactor":
            return optax.adafactor(schedule, min_dim_size_to_factor=32)
        case "sgd":
            return optax.sgd(schedule, momentum=config.beta1)
        case "schedule-free":
            return optax.contrib.schedule_free_adamw(
                config.learning_rate, config.warmup, weight_decay=config.weight_decay
            )
    if config.base == "adamw":
        return optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decayed,
        )
    merged, split = layout.selects("q", "k", "v"), layout.selects("o")

    def axes(path: Any, leaf: Any) -> Any:
        name, last = path_name(path), leaf.ndim - 1
        if not matrices(name, leaf):
            return None
        if merged(name, leaf):
            return optax.contrib.MuonDimensionNumbers((last - 2,), (last - 1, last))
        rows = (last - 2, last - 1) if split(name, leaf) else (last - 1,)
        return optax.contrib.MuonDimensionNumbers(rows, (last,))

    return optax.contrib.muon(
        schedule,
        weight_decay=config.weight_decay,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda tree: jax.tree_util.tree_map_with_path(axes, tree),
    )


def _with_rates(base: Any, config: OptimizerConfig, layout: stabmon.Layout) -> Any:
    """`base` with the updates of each group of `rates` scaled to its rate, if there are any."""
    if not config.rates:
        return base
    scaled = []
    for group, rate in config.rates:
        chosen = layout.selects(group)
        mask = lambda tree, chosen=chosen: stabmon.selection(tree, chosen)
        scaled.append(optax.masked(optax.scale(rate / config.learning_rate), mask))
    return optax.chain(base, *scaled)


def make_msign(config: MsignConfig | None, layout: stabmon.Layout) -> Any:
    """`optax_ext.msign` as configured, or a transform that does nothing."""
    if config is None:
        return optax.identity()
    return optax_ext.msign(
        config.period,
        config.select,
        config.method,
        config.stagger,
        layout=layout,
        trigger=config.trigger,
        blend=config.blend,
    )
