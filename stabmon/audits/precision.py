"""`precision`: gradients of two programs for the same weights and batch.

A differential test: the program that trains, against a reference that computes the same in another
way. What rounding alone may do is measured, by the reference itself on weights that are off by one
unit of rounding.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from stabmon.audits.case import Case, Outcome, Verdict, acquitted, undecided, value_of
from stabmon.layout import Layout
from stabmon.layout.paths import leaves_with_paths

NAME = "precision"
# Rounding in every operation of a program adds up to more than rounding of its weights alone.
_MARGIN = 8.0
_SCOPES = {
    "attention": "qkvo",
    "mlp": ("mlp_up", "mlp_gate", "mlp_down", "expert_up", "expert_gate", "expert_down"),
    "router": ("router",),
}


class _Errors(NamedTuple):
    """Of a leaf, or a matrix of a role: ‖error‖, what rounding gives, ‖gradient‖, cosine with W."""

    error: Any
    floor: Any
    norm: Any
    along: Any


def precision(case: Case) -> Verdict:
    """Whether the gradients are those of the reference, within what rounding gives.

    The reference is `case.reference`; without one it is `case.loss` itself in float64. For each
    leaf, and each head of a layer where there is a layout,

        r = ‖g − g_ref‖ / max(‖g_ref(W(1 ± ε)) − g_ref‖, ε ‖g_ref‖),

    ε that of `case.precision`. It convicts where r > 8 and names the place where the relative
    error is largest: an error in the backward pass of a layer reaches all layers below, but is
    largest where it is made. "along" is the cosine of the error with W: rounding has none.

    Args:
        case: Its loss, params and batch; reference, precision and layout where there are.

    References:
        arXiv 2510.04212: a bias of δ drives W along a low-rank direction.
    """
    given = jax.tree.leaves(case.params)
    dtype = case.precision or str(jnp.result_type(*given))
    if case.reference is None and dtype == "float64":
        return undecided(NAME, "float64 has no higher precision: give a reference")
    eps = float(jnp.finfo(dtype).eps)
    if case.reference is None:
        with jax.enable_x64(True):
            params = jax.tree.map(_wider, case.params)
            found = _compare(
                case.loss, case.loss, case.layout, case.params, params, case.batch, eps
            )
            found = jax.device_get(found)
    else:
        params = case.params
        found = _compare(case.loss, case.reference, case.layout, params, params, case.batch, eps)
        found = jax.device_get(found)
    return _judge(case, found, eps)


def _wider(x: Any) -> Any:
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


@partial(jax.jit, static_argnames=("loss", "reference", "layout", "eps"))
def _compare(
    loss: Any, reference: Any, layout: Layout | None, params: Any, wide: Any, batch: Any, eps: float
) -> tuple[dict[str, _Errors], dict[str, _Errors]]:
    """Errors by leaf, and by role on canonical axes."""
    slope = lambda f, at: jax.grad(lambda w: value_of(f(w, batch)))(at)
    right = slope(reference, wide)
    near = slope(reference, _nudged(wide, eps))
    given = slope(loss, params)
    minus = lambda a, b: jax.tree.map(lambda x, y: x.astype(y.dtype) - y, a, b)
    trees = (minus(given, right), minus(near, right), right, params)
    whole = lambda *x: _measure(x, tuple(range(x[0].ndim)))
    leaves = zip(*(leaves_with_paths(tree) for tree in trees), strict=True)
    by_leaf = {row[0][0]: whole(*(leaf for _, leaf in row)) for row in leaves}
    if layout is None:
        return by_leaf, {}
    # The axes that stay are those of layers, heads and experts.
    roles = [layout.collect(tree, fold=False) for tree in trees]
    by_role = {}
    for role, x in roles[0].items():
        if "down" not in role.split("_")[1:] or x.ndim == 3 or role.startswith("mlp"):
            axes = tuple(range(max(x.ndim - 2, 1), x.ndim))
            by_role[role] = _measure(tuple(tree[role] for tree in roles), axes)
    return by_leaf, by_role


def _nudged(params: PyTree, eps: float) -> PyTree:
    """Parameters times 1 ± ε, signs at random."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    sign = lambda key, x: jax.random.rademacher(key, x.shape, jnp.int8).astype(x.dtype)
    moved = [
        x + x * (eps * sign(key, x)).astype(x.dtype) for key, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


def _measure(trees: tuple[Any, ...], axes: tuple[int, ...]) -> _Errors:
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axis=axes))
    error, near, right, w = (x.astype(trees[2].dtype) for x in trees)
    scale = norm(error) * norm(w)
    along = jnp.sum(error * w, axis=axes) / jnp.where(scale > 0, scale, jnp.ones_like(scale))
    return _Errors(norm(error), norm(near), norm(right), along)


def _judge(case: Case, found: Any, eps: float) -> Verdict:
    by_leaf, by_role = found
    total = float(np.sqrt(sum(np.square(x.norm) for x in by_leaf.values())))
    relative = {path: _relative(x, total) for path, x in by_leaf.items()}
    ratio = {path: _ratio(x, eps, total) for path, x in by_leaf.items()}
    worst = max(ratio, key=lambda path: ratio[path])
    numbers = {"error": float(relative[worst]), "ratio": float(ratio[worst]), "bound": _MARGIN}
    if not all(np.isfinite(x.error) and np.isfinite(x.norm) for x in by_leaf.values()):
        return undecided(NAME, "gradients are not finite", **numbers)
    off = [path for path in ratio if ratio[path] > _MARGIN]
    if not off:
        return acquitted(
            NAME,
            f"gradients agree with the reference within {ratio[worst]:.1f} × rounding",
            **numbers,
        )
    worst = max(off, key=lambda path: relative[path])
    numbers |= {"error": float(relative[worst]), "ratio": float(ratio[worst])}
    place: dict[str, Any] = {"path": worst, "cause": "numerics"}
    where, along = worst, float(by_leaf[worst].along)
    if by_role:
        role, layer, head = _place(by_role, eps, total)
        if role:
            scope = next((name for name, roles in _SCOPES.items() if role in roles), "")
            assert case.layout is not None
            layers = case.layout.layers(case.params)[role]
            place |= {"cause": f"{scope} numerics".strip(), "layer": layers[layer]}
            place["head"] = head
            index = (layer,) if head is None else (layer, head)
            here = by_role[role]
            numbers["error"] = float(_relative(here, total)[index])
            numbers["ratio"] = float(_ratio(here, eps, total)[index])
            along = float(here.along[index])
            at = "" if head is None else f", head {head}"
            where = f"layer {layers[layer]}{at}, gradient of W_{role}"
    numbers["along"] = along
    sentence = (
        f"{where}: off by {numbers['error']:.2g} of its size, {numbers['ratio']:.3g} × what "
        f"rounding gives; cosine {along:+.2f} with the weights"
    )
    return Verdict(NAME, Outcome.CONVICTED, sentence, numbers=numbers, **place)


def _relative(x: _Errors, total: float) -> Any:
    """Error over the gradient, of which next to nothing counts as a millionth of the whole."""
    return np.asarray(x.error) / np.maximum(x.norm, 1e-6 * total + np.finfo(np.float32).tiny)


def _ratio(x: _Errors, eps: float, total: float) -> Any:
    floor = np.maximum(x.floor, eps * np.maximum(x.norm, 1e-6 * total))
    return np.asarray(x.error) / np.maximum(floor, np.finfo(np.float32).tiny)


def _place(by_role: dict[str, _Errors], eps: float, total: float) -> tuple[str, int, int | None]:
    """Role, index of layer and head where the relative error is largest of all that are off."""
    best: float = 0.0
    found: tuple[str, int, int | None] = ("", 0, None)
    for role, x in by_role.items():
        error = np.where(_ratio(x, eps, total) > _MARGIN, _relative(x, total), 0.0)
        if error.max() > best:
            best = float(error.max())
            index = [int(i) for i in np.argwhere(error == error.max())[0]]
            found = (role, index[0], index[1] if len(index) > 1 else None)
    return found
