"""`modules` and `init`: what each block does to the loss, and whether a fresh model is sound."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from stabmon.audits.case import (
    Case,
    Outcome,
    Verdict,
    acquitted,
    undecided,
    value_of,
    vocabulary,
)
from stabmon.layout import Layout, leaves_with_paths

# What writes into the residual stream.
_OUTPUTS = ("o", "mlp_down", "expert_down")


def modules(case: Case) -> Verdict:
    """Whether each block does something to the loss, and gets a gradient.

    Each block's output matrix is set to zero in turn, one forward pass each. It convicts of a block
    whose matrix is not zero and that makes no difference (bypassed), of one whose matrix is zero
    after the first steps (dead), and of a matrix of all heads, or of all experts, in a layer that
    gets no gradient while its factors are not zero.

    Args:
        case: Its loss, params, batch and layout.
    """
    if case.layout is None:
        return undecided("modules", "needs a layout")
    layout, layers = case.layout, case.layout.layers(case.params)
    roles = tuple(role for role in _OUTPUTS if role in layers)
    effects, slopes, sizes = jax.device_get(
        _effects(case.loss, layout, roles, case.params, case.batch)
    )
    weakest = min((float(abs(x)) for row in effects.values() for x in row), default=math.nan)
    numbers = {"weakest effect": weakest}
    for role, row in effects.items():
        for i, effect in enumerate(row):
            layer, size = layers[role][i], float(sizes[role][i])
            if size == 0 and case.step > 0:
                text = f"layer {layer}: W_{role} is zero after {case.step:,} steps"
                return Verdict("modules", Outcome.CONVICTED, text, "dead", numbers, None, layer)
            if size > 0 and effect == 0:
                text = f"layer {layer}: without W_{role} the loss is the same to the bit"
                return Verdict("modules", Outcome.CONVICTED, text, "bypassed", numbers, None, layer)
    partner = {"q": "k", "k": "q", "v": "o", "mlp_up": "mlp_down", "mlp_gate": "mlp_down"}
    for role, row in slopes.items():
        for i, slope in enumerate(row):
            other = sizes.get(partner.get(role, role), row + 1)
            if slope == 0 and np.ravel(other)[min(i, len(other) - 1)] > 0:
                layer = layers[role][i]
                text = f"layer {layer}: no gradient reaches W_{role}"
                return Verdict(
                    "modules", Outcome.CONVICTED, text, "no gradient", numbers, None, layer
                )
    return acquitted("modules", "every block moves the loss and gets a gradient", **numbers)


@partial(jax.jit, static_argnames=("loss", "layout", "roles"))
def _effects(
    loss: Any, layout: Layout, roles: tuple[str, ...], params: PyTree, batch: Any
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    """By role and layer: the loss without it, less the loss; ‖gradient‖; ‖W‖."""
    score = lambda w: value_of(loss(w, batch))
    grads = jax.grad(score)(params)
    # The program that is ablated must be the one that it is compared with, to the bit.
    layers = layout.layers(params)
    effects = {}
    for role in roles:
        chosen = layout.selects(role)
        names = [path for path, leaf in leaves_with_paths(params)]
        flat, structure = jax.tree.flatten(params)
        rules = [rule for rule in layout.rules if role in rule.roles]

        def without(
            number, rules=rules, chosen=chosen, flat=flat, names=names, structure=structure
        ):
            leaves = []
            for path, leaf in zip(names, flat, strict=True):
                rule = next((x for x in rules if x.layer(path) is not None), None)
                if rule is None or not chosen(path, leaf):
                    leaves.append(leaf)
                elif rule.stacked:
                    axis = rule.left.split().index("l")
                    shape = [-1 if i == axis else 1 for i in range(leaf.ndim)]
                    keep = (jnp.arange(leaf.shape[axis]) != number).reshape(shape)
                    leaves.append(jnp.where(keep, leaf, jnp.zeros_like(leaf)))
                else:
                    keep = rule.layers[0] + rule.layers[1] * rule.layer(path) != number
                    leaves.append(jnp.where(keep, leaf, jnp.zeros_like(leaf)))
            return score(jax.tree.unflatten(structure, leaves))

        first = min(layers[role])
        numbers = jnp.asarray(
            [-1, *(x - first if any(r.stacked for r in rules) else x for x in layers[role])]
        )
        row = jax.lax.map(without, numbers)
        effects[role] = row[1:] - row[0]
    norm = lambda x: jnp.sqrt(
        jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(1, x.ndim)))
    )
    of = lambda tree: {role: norm(x) for role, x in layout.collect(tree, fold=False).items()}
    return effects, of(grads), of(params)


def init(case: Case) -> Verdict:
    """Whether a fresh model is as it should be: loss ≈ ln V, logits and gradients of one size.

    It convicts of a loss more than 1 nat above ln V or below it (which no fresh model can be),
    attention logits as without their scale H^-1/2, layers that are copies of each other, and
    gradient norms that differ by more than 1,000 from layer to layer.

    Args:
        case: Its loss, params, batch and logits; layout and seen where there are; `step` 0.
    """
    if case.step:
        return undecided("init", f"the model is not fresh, {case.step:,} steps old")
    if case.logits is None:
        return undecided("init", "needs logits=(params, batch) -> (B, T, V)")
    loss, spread, grads = _fresh(case.loss, case.logits, case.layout, case.params, case.batch)
    uniform = math.log(vocabulary(case.logits, case.params, case.batch))
    numbers = {"loss": float(loss), "ln V": uniform, "logits": float(spread)}
    convict = lambda text, cause, layer=None: Verdict(
        "init", Outcome.CONVICTED, text, cause, numbers, None, layer
    )
    if not math.isfinite(numbers["loss"]):
        return convict("the loss of the fresh model is not finite", "initialisation")
    if abs(numbers["loss"] - uniform) > 1:
        side = "above" if numbers["loss"] > uniform else "below"
        text = f"loss {numbers['loss']:.2f} is far {side} ln V = {uniform:.2f}"
        return convict(text, "initialisation" if side == "above" else "leak")
    if case.layout is None:
        return acquitted("init", "loss and logits are those of a fresh model", **numbers)
    matrices = case.layout.collect(case.params, fold=False)
    layers = case.layout.layers(case.params)
    for role, x in matrices.items():
        if x.shape[0] > 1 and bool(jnp.any(x)):
            same = np.asarray(jnp.all(x[1:] == x[:1], axis=tuple(range(1, x.ndim))))
            if same.any():
                layer = layers[role][1 + int(np.argmax(same))]
                return convict(f"W_{role} of layer {layer} is a copy of layer 0's", "copies", layer)
    slopes = np.concatenate([np.ravel(x) for x in jax.device_get(grads).values()])
    slopes = slopes[slopes > 0]
    numbers["gradients"] = float(slopes.max() / slopes.min()) if len(slopes) else math.nan
    if numbers["gradients"] > 1e3:
        return convict("gradient norms differ 1,000-fold from layer to layer", "initialisation")
    if case.seen is not None and "q" in matrices and not case.layout.qk_norm:
        return _scale(case, matrices, numbers) or acquitted(
            "init", "a sound fresh model", **numbers
        )
    return acquitted("init", "loss, logits and gradients are those of a fresh model", **numbers)


def _scale(case: Case, matrices: Any, numbers: dict[str, float]) -> Verdict | None:
    """Logits beyond what unit inputs give; √H times that is the scale that is missing."""
    assert case.seen is not None
    peak = np.asarray(case.seen(case.params, case.batch)["max_attention_logit"])
    rms = lambda x: np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), axis=(1, 2, 3)))
    _, _, d, h = matrices["q"].shape
    std = rms(matrices["q"]) * rms(matrices["k"]) * d  # of q·k/√H, for x of unit size
    ratio = peak.max(axis=1) / np.maximum(std, 1e-12)
    numbers["peak logit"] = float(ratio.max())
    # The largest of some 10⁵ normal numbers is 4.4; equal tokens add to it.
    if (ratio > 4.4 * math.sqrt(h) / 2).all() and h >= 8:
        text = f"attention logits are {ratio.max():.1f} × their size at init: H^-1/2 is missing"
        return Verdict("init", Outcome.CONVICTED, text, "missing scale", numbers)
    return None


@partial(jax.jit, static_argnames=("loss", "logits", "layout"))
def _fresh(loss: Any, logits: Any, layout: Layout | None, params: Any, batch: Any) -> Any:
    value, grads = jax.value_and_grad(lambda w: value_of(loss(w, batch)))(params)
    scores = logits(params, batch).astype(jnp.float32)
    norms = {}
    if layout is not None:
        norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim))))
        norms = (
            {"o": norm(layout.collect(grads, ["o"], fold=False)["o"])} if layout.has("o") else {}
        )
    return value, jnp.std(scores), norms
