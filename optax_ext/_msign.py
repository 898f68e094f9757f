"""`msign`: restores the spectrum of weight matrices on a schedule, on demand, or spread over steps.

Here: the transform and its state. Not here: when which matrices are due (`_cadence.py`), the
restoration of a stack (`_restore.py`), which leaves (`_selection.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from optax_ext._cadence import staggered, together
from optax_ext._grouping import group
from optax_ext._patterns import Patterns
from optax_ext._restore import Record, Rule, Scalar
from optax_ext._selection import find_matrices
from stabmon.layout import Layout, Select
from stabmon.linalg.mesh import mesh_in_force
from stabmon.linalg.sign import check_method


class MsignState(NamedTuple):
    """State of `msign`. Per-matrix vectors are in the order of `msign_names`.

    Attributes:
        msign_step: Steps counted so far.
        msign_last: Step at which each matrix was last restored, 0 for never.
        msign_rank_before: Its stable rank then, before the restoration (power iteration).
        msign_rank_after: And after.
        msign_skipped: How often each was due but not finite, and so left to the base optimizer.
        msign_reference: With `trigger`, the early stable rank it is compared with, 0 until taken.
        msign_active: With `trigger`, whether it is being restored at each period.
    """

    msign_step: Int[Array, ""]
    msign_last: Int[Array, " matrices"]
    msign_rank_before: Float[Array, " matrices"]
    msign_rank_after: Float[Array, " matrices"]
    msign_skipped: Int[Array, " matrices"]
    msign_reference: Float[Array, " matrices"]
    msign_active: Bool[Array, " matrices"]


def msign(
    period: int = 100,
    select: Select | Sequence[str] = None,
    method: str | Callable[[Array], Array] = "auto",
    stagger: bool = False,
    *,
    layout: Layout | Patterns | None = None,
    per_head: bool = False,
    trigger: Scalar | None = None,
    blend: Scalar = 1.0,
    max_gain: float | int | None = None,
    skip_idle: bool = False,
    sharding: jax.sharding.NamedSharding | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Replaces weight matrices by their rescaled sign: W ← (‖W‖_F/‖sign W‖_F) sign W.

    At every `period`-th step the update of each selected matrix becomes target − params, where the
    target is formed from params + updates, so weight decay, schedules and clipping before it have
    had their say. ‖W‖_F stays, all non-zero singular values become equal. All other updates,
    and all updates of all other steps, pass through bit for bit. A matrix that is zero or not
    finite keeps its update, the latter is counted in `msign_skipped`.

    Place in the chain: last, but for `track_delta`. Inside `optax.MultiSteps` steps are counted by
    applied updates (the restoration is then computed at each micro-step of a due step, and one is
    used); after a transform that emits zero updates while it waits, set `skip_idle`.
    Under jit a step is told from the next by a conditional, and XLA then keeps the updates of all
    selected matrices apart from what comes after, a few per cent of a very short step. To spare
    that too, say outside of jit which steps are due: `tx.update(…, msign_due=…)` takes a Python
    bool, so make it a static argument of the train step,
    `msign_due=(step + 1) % period == 0` where `step` counts the updates applied before. A step
    that is not due then compiles to the base optimizer.

    Inside `optax.inject_hyperparams`, give static_args=("period", "select", "method", "layout",
    "max_gain"); `blend` and `trigger` may be schedules.

    Args:
        period: Steps between restorations, at least 1.
        select: Which leaves. None: attention and MLP matrices, never embeddings, the head or
            routers. A role or group of the layout ("attention", "mlp", "all", "q" …), a sequence
            of them, a regular expression on the path, a predicate (path, leaf), or a tree of
            booleans.
        method: See `matrix_sign`.
        stagger: Spread the matrices over the period, each restored once per period, so that each
            step restores about 1/period of them and no step stands out.
        layout: Which axes are rows and columns: a `stabmon.Layout`, or a mapping from a path glob
            to an einops pattern ending in rows and columns, "l d n h -> l d (n h)", or to such a
            pattern with the sizes it needs, ("d (three n h) -> three d (n h)",
            {"three": 3, "n": 12}) for a fused projection. None: `stabmon.find_layout(params)`.
        per_head: Restore each head's block on its own.
        trigger: None, or a fraction in (0, 1): at a due step only matrices are restored whose
            stable rank has fallen below this fraction of its value at the first due step. Such a
            matrix stays in treatment until its stable rank, before treatment, is back above
            (1 + trigger)/2 of it.
        blend: In (0, 1]; 1 restores at once, less mixes (1 − blend) W/‖W‖_F with
            blend S/‖S‖_F, S = sign W, and scales to ‖W‖_F.
        max_gain: Largest amplification of a singular value, relative to the root mean square of
            all; None: none. See `matrix_sign`.
        skip_idle: Do not count a step at which the updates of all selected matrices are zero.
        sharding: Of the stacks (matrices, m, n) in which equal shapes are gathered. None: the stack
            axis divided over all devices of the mesh in force (`jax.set_mesh`), so that whole
            matrices move to devices once (an all-to-all for each mesh axis, in and out), instead
            of parts in each product. Without a mesh in force give it: NamedSharding(mesh,
            P("data")); also where leaves are divided over layers: then nothing moves at all.

    Returns:
        A transform whose state is `MsignState`.

    Raises:
        ValueError: An argument is out of range; in `init` and `update`, nothing is selected or a
            leaf's matrix axes are unknown; in `update`, `params` is None.

    >>> params = {"w": jnp.diag(jnp.array([3.0, 4.0])), "b": jnp.ones(2)}
    >>> tx = optax.chain(optax.sgd(0.0), msign(period=1))
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> new = optax.apply_updates(params, updates)
    >>> [round(float(x), 3) for x in jnp.diag(new["w"])], new["b"].tolist()
    ([3.536, 3.536], [1.0, 1.0])

    References:
        MSign, arXiv 2602.01734: period 100, attention projections or all matrices.
    """
    _check(period, method, trigger, blend, max_gain)
    rule = Rule(method, trigger, blend, max_gain, sharding)

    def init_fn(params):
        count = sum(view.count for view in find_matrices(params, select, layout, per_head))
        # A buffer each: an array that stands in a state twice cannot be donated.
        kinds = (jnp.int32, jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.bool_)
        return MsignState(jnp.zeros((), jnp.int32), *(jnp.zeros(count, kind) for kind in kinds))

    def update_fn(updates, state, params=None, *, msign_due=None, **extra_args):
        del extra_args
        _check_due(msign_due, stagger, skip_idle)
        if params is None:
            raise ValueError(
                "msign rewrites updates from the parameters; call update(updates, state, params)"
            )
        views = find_matrices(params, select, layout, per_head)
        if msign_due is False:
            return updates, state._replace(msign_step=optax.safe_increment(state.msign_step))
        leaves, structure = jax.tree.flatten(updates)
        weights = structure.flatten_up_to(params)
        held = {view.index: leaves[view.index] for view in views}
        base = {view.index: weights[view.index] for view in views}
        groups = group(views, [(*v.tall, base[v.index].dtype, held[v.index].dtype) for v in views])
        counted = jnp.asarray(True)
        if skip_idle:
            counted = jnp.any(jnp.stack([jnp.any(u != 0) for u in held.values()]))
        step = jnp.where(counted, optax.safe_increment(state.msign_step), state.msign_step)
        each = 1 if msign_due else period
        where, ours = sharding or _over_mesh(), sharding is None
        placed = dataclasses.replace(rule, sharding=where, undivided=ours)
        treat = functools.partial(staggered if stagger else together, groups, placed, each)
        record = Record(*state[1:])
        held, record = _in_auto_mode(treat, (held, record))(step, counted, held, base, record)
        for i, leaf in held.items():
            leaves[i] = leaf
        return jax.tree.unflatten(structure, leaves), MsignState(step, *record)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def msign_names(
    params: PyTree,
    select: Select | Sequence[str] = None,
    *,
    layout: Layout | Patterns | None = None,
    per_head: bool = False,
) -> tuple[str, ...]:
    """Name of each matrix, in the order of the vectors in `MsignState`; arguments as for `msign`.

    >>> msign_names({"w": jnp.ones((2, 3)), "v": jnp.ones((3, 3))}, select="w")
    ('w',)
    """
    views = find_matrices(params, select, layout, per_head)
    return tuple(name for view in views for name in view.names)


def _over_mesh() -> jax.sharding.NamedSharding | None:
    """The first axis of a stack divided over all devices of the mesh in force."""
    mesh = mesh_in_force()
    return None if mesh is None else jax.sharding.NamedSharding(mesh, jax.P(mesh.axis_names))


def _in_auto_mode(f: Callable, like: PyTree) -> Callable:
    """The function with the compiler choosing shardings, also on a mesh with explicit axes.

    There, decompositions and reshapes of sharded axes are refused. Results are sharded as `like`.
    """
    if jax.sharding.AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return f
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, like)
    return jax.sharding.auto_axes(f, out_sharding=shardings)


def _check_due(due: object, stagger: bool, skip_idle: bool) -> None:
    """Raises ValueError unless `due` can be acted on."""
    if due is not None and not isinstance(due, bool):
        raise ValueError(
            f"msign: expected msign_due to be a Python bool, got {due!r}; make it a static "
            "argument of the jitted step, or leave it out"
        )
    if due is not None and (stagger or skip_idle):
        raise ValueError(
            "msign: msign_due names the steps at which all matrices are due; leave it out with "
            "stagger or skip_idle"
        )


def _check(period: object, method: object, trigger: object, blend: object, gain: object) -> None:
    """Raises ValueError for arguments out of range; traced ones are left to their schedule."""
    if isinstance(period, bool) or not isinstance(period, int):
        raise ValueError(
            f"msign: expected an integer period, got {period!r}; in optax.inject_hyperparams write "
            "static_args=('period', …)"
        )
    if period < 1:
        raise ValueError(f"msign: expected period >= 1, got {period}")
    check_method(method, "msign")
    if isinstance(trigger, float | int) and not 0 < trigger < 1:
        raise ValueError(f"msign: expected trigger in (0, 1) or None, got {trigger}")
    if isinstance(blend, float | int) and not 0 < blend <= 1:
        raise ValueError(f"msign: expected blend in (0, 1], got {blend}")
    if gain is not None and not (isinstance(gain, float | int) and gain > 0):
        raise ValueError(f"msign: expected max_gain > 0 or None, got {gain!r}")
