"""`msign`: gives weight matrices their stable rank back, on a schedule, on demand, or in turn.

Here: the transform and its state. Which matrices are meant is `_matrices.py`; how equal shapes are
gathered, and when which are due, `_stacks.py`; the restoration of a stack `_restoration.py`; the
matrix sign itself `stabmon.linalg.sign`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from optax_ext._matrices import find_matrices
from optax_ext._restoration import Record, Scalar, restore
from optax_ext._stacks import over_devices, rewrite, rewrite_in_turn, stacked
from stabmon.layout import Layout, Select
from stabmon.linalg.checks import as_float
from stabmon.linalg.mesh import in_auto_mode, mesh_in_force
from stabmon.linalg.sign import check_method, matrix_sign


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
    layout: Layout | None = None,
    trigger: Scalar | None = None,
    blend: Scalar = 1.0,
    condition: float | int | None = None,
    sharding: jax.sharding.NamedSharding | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Replaces weight matrices by their rescaled sign: W ← (‖W‖_F/‖sign W‖_F) sign W.

    At every `period`-th step the update of each selected matrix becomes target − params, where the
    target is formed from params + updates, so weight decay, schedules and clipping before it are
    in it. ‖W‖_F stays, all non-zero singular values become equal. All other updates, and all
    updates of all other steps, pass through bit for bit. A matrix that is zero or not finite keeps
    its update; the latter is counted in `msign_skipped`.

    Place in the chain: last, but for `track_delta`. With `optax.MultiSteps` put the whole chain
    inside it: steps are then counted by applied updates (the restoration is computed at each
    micro-step of a due step, and one is used).
    Under jit a step is told from the next by a conditional, and XLA then keeps the updates of all
    selected matrices apart from what comes after, a few per cent of a very short step. To spare
    that too, say outside of jit which steps are due: `tx.update(…, msign_due=…)` takes a Python
    bool, so make it a static argument of the train step,
    `msign_due=(step + 1) % period == 0` where `step` counts the updates applied before. A step
    that is not due then compiles to the base optimizer.

    Inside `optax.inject_hyperparams`, give static_args=("period", "select", "method", "layout",
    "condition"); `blend` and `trigger` may be schedules.

    Args:
        period: Steps between restorations, at least 1.
        select: Which leaves. None: attention and MLP matrices, never embeddings, the head or
            routers. A role or group of the layout ("attention", "mlp", "all", "q" …) or a sequence
            of them; as for `track_delta`, any other string is a regular expression on the path, or
            a predicate (path, leaf), or a tree of booleans.
        method: See `matrix_sign`.
        stagger: Spread the matrices over the period, each restored once per period, so that each
            step restores about 1/period of them and no step stands out.
        layout: Which matrices a leaf holds. None: `stabmon.find_layout(params)`.
        trigger: None, or a fraction in (0, 1): at a due step only matrices are restored whose
            stable rank has fallen below this fraction of its value at the first due step. Such a
            matrix stays in treatment until its stable rank, before treatment, is back above
            (1 + trigger)/2 of it.
        blend: In (0, 1]; 1 restores at once, less mixes (1 − blend) W/‖W‖_F with
            blend S/‖S‖_F, S = sign W, and scales to ‖W‖_F.
        condition: Largest σ₁/σ that is brought to one level; None: as `matrix_sign` has it. Smaller
            σ are lifted in part.
        sharding: Of the stacks (matrices, m, n) in which equal shapes are gathered. None: the stack
            axis divided over all devices of the mesh in force (`jax.set_mesh`), so that whole
            matrices move to devices once (an all-to-all for each mesh axis, in and out), instead
            of parts in each product. Without a mesh in force give it: NamedSharding(mesh,
            P("data")); also where leaves are divided over layers: then nothing moves at all.

    Returns:
        A transform whose state is `MsignState`.

    Raises:
        ValueError: An argument is out of range; in `init` and `update`, nothing is selected, or a
            leaf is not floating-point or does not tell its matrices; in `update`, `params` is None.

    >>> params = {"w": jnp.diag(jnp.array([3.0, 4.0])), "b": jnp.ones(2)}
    >>> tx = optax.chain(optax.sgd(0.0), msign(period=1))
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> new = optax.apply_updates(params, updates)
    >>> [round(float(x), 3) for x in jnp.diag(new["w"])], new["b"].tolist()
    ([3.536, 3.536], [1.0, 1.0])

    References:
        MSign, arXiv 2602.01734: period 100, attention projections or all matrices.
    """
    _check(period, method, trigger, blend)
    signed = (
        functools.partial(matrix_sign, condition=condition)
        if condition is not None
        else matrix_sign
    )
    jax.eval_shape(signed, jnp.zeros((2, 2)))
    sign = lambda x: signed(x, method)

    def init_fn(params):
        count = sum(view.count for view in find_matrices(params, select, layout))
        # A buffer each: an array that stands in a state twice cannot be donated.
        kinds = (jnp.int32, jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.bool_)
        return MsignState(jnp.zeros((), jnp.int32), *(jnp.zeros(count, kind) for kind in kinds))

    def update_fn(updates, state, params=None, *, msign_due=None, **extra_args):
        del extra_args
        _check_due(msign_due, stagger)
        if params is None:
            raise ValueError(
                "msign rewrites updates from the parameters; call update(updates, state, params)"
            )
        views = find_matrices(params, select, layout)
        step: Any = optax.safe_increment(state.msign_step)
        if msign_due is False:
            return updates, state._replace(msign_step=step)
        leaves, structure = jax.tree.flatten(updates)
        weights = structure.flatten_up_to(params)
        held = {view.index: leaves[view.index] for view in views}
        base = {view.index: jnp.asarray(weights[view.index]) for view in views}
        stacks = stacked(views, [(base[i].dtype, held[i].dtype) for i in held])
        placed = sharding or _over_mesh()

        def treat_all(step, updates, params, record):
            restored = functools.partial(
                restore, step=step, sign=sign, trigger=trigger, blend=blend
            )
            restored = over_devices(restored, placed, moved=sharding is None)
            treat = functools.partial(_rewritten, restored)
            if stagger:
                return rewrite_in_turn(stacks, treat, step, period, updates, params, record)
            due = msign_due or step % period == 0
            return rewrite(stacks, treat, due, updates, params, record)

        record = Record(*state[1:])
        held, record = in_auto_mode(treat_all, (held, record))(step, held, base, record)
        for i, leaf in held.items():
            leaves[i] = leaf
        return jax.tree.unflatten(structure, leaves), MsignState(step, *record)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def msign_names(
    params: PyTree, select: Select | Sequence[str] = None, *, layout: Layout | None = None
) -> tuple[str, ...]:
    """Name of each matrix, in the order of the vectors in `MsignState`; arguments as for `msign`.

    >>> msign_names({"w": jnp.ones((2, 3)), "v": jnp.ones((3, 3))}, select="w")
    ('w',)
    """
    return tuple(name for view in find_matrices(params, select, layout) for name in view.names)


def _rewritten(
    restored: Callable[[Array, Record], Any],
    u: Float[Array, "matrices m n"],
    p: Float[Array, "matrices m n"],
    record: Record,
) -> tuple[Float[Array, "matrices m n"], Record]:
    """Updates that lead to the restored matrices, unchanged where there is none."""
    p = as_float(p, "msign")
    target, chosen, record = restored(p.astype(jnp.float32) + u.astype(jnp.float32), record)
    new = (target.astype(p.dtype) - p).astype(u.dtype)
    return jnp.where(chosen[:, None, None], new, u), record


def _over_mesh() -> jax.sharding.NamedSharding | None:
    """The first axis of a stack divided over all devices of the mesh in force."""
    mesh = mesh_in_force()
    return None if mesh is None else jax.sharding.NamedSharding(mesh, jax.P(mesh.axis_names))


def _check_due(due: object, stagger: bool) -> None:
    """Raises ValueError unless `due` can be acted on."""
    if due is not None and not isinstance(due, bool):
        raise ValueError(
            f"msign: expected msign_due to be a Python bool, got {due!r}; make it a static "
            "argument of the jitted step, or leave it out"
        )
    if due is not None and stagger:
        raise ValueError(
            "msign: msign_due names the steps at which all matrices are due; leave it out with "
            "stagger"
        )


def _check(period: object, method: object, trigger: object, blend: object) -> None:
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
