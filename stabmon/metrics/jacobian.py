"""Layer Jacobians without their matrices: norms, alignment of neighbours, growth through depth.

Layers are callables h → h; only Jacobian-vector products in both directions are taken. Which
activations to linearise at, and how often, is for `stabmon.monitor`; norms of weight matrices are
in `spectrum.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stabmon.linalg.krylov import LinearMap, SingularTriple, error_angle, leading_triple

Layer = Callable[[Array], Array]


class JacobianStats(NamedTuple):
    """Leading singular triples along a trajectory; float32, L layers.

    For a later layer A and the layer B before it, with top singular vectors u (output) and v
    (input): nothing cancels in AB when B's output direction is A's input direction.

    Attributes:
        norms: ‖J_l‖₂ (L,).
        forward: |v_Aᵀ u_B| of neighbours (L − 1,), in [0, 1]; the one that makes products grow.
        reversed: |u_Aᵀ v_B| of neighbours (L − 1,), in [0, 1].
        bound: (aM)^L/a with M the least norm and a the least forward alignment; ∞ on overflow.
        growth: aM, the factor per layer.
        danger: Whether aM > 1, so that the bound grows with depth.
        residual: ‖Jᵀu − σv‖/σ (L,): relative error of a norm at most, far less as a rule.
        gap: 1 − σ₂/σ₁ (L,), or less while σ₂ is not settled; the error angle of u and v is at most
            about residual/gap.
        converged: Whether that angle is within tolerance in every layer.
    """

    norms: Float[Array, " L"]
    forward: Float[Array, " L-1"]
    reversed: Float[Array, " L-1"]
    bound: Float[Array, ""]
    growth: Float[Array, ""]
    danger: Bool[Array, ""]
    residual: Float[Array, " L"]
    gap: Float[Array, " L"]
    converged: Bool[Array, ""]


def jacobian_alignment(
    layers: Sequence[Layer],
    h: ArrayLike,
    *,
    tolerance: float | int = 5e-4,
    cycles: int = 32,
    block: int = 4,
    depth: int = 4,
) -> JacobianStats:
    """Norms of the layers' Jacobians and alignment of neighbours, at h and what follows from it.

    J_l is the Jacobian of layer l at its own input h_l = layer_{l−1}(… layer_1(h)), over all axes
    of h together. The bound ‖J_L … J_1‖₂ >= (aM)^L/a is the paper's and supposes that the leading
    directions carry the product; `cumulative_norms` has one that holds always.

    Restarted block Krylov iteration on JᵀJ with full re-orthogonalisation, a fixed start, at most
    `cycles` · `block` · (2 · `depth` − 1) products with J and as many with Jᵀ a layer; memory is
    `block` · `depth` vectors of the size of h, so pass few tokens of a large model. Layers that
    compute in bfloat16 round their products too much to converge. Where σ₂ = σ₁ (the identity,
    say) norms are right, alignment has no meaning and `converged` is False. A zero Jacobian has
    norm 0 and alignments 0. One layer: a = 1. Non-finite layers: NaN, not converged.

    Args:
        layers: L callables that keep the shape of h, first to last; static under jit.
        h: Input of the first layer, any shape and float dtype.
        tolerance: Largest error angle of singular vectors, in radians. Two of them meet in an
            alignment, so the default keeps alignments to 1e-3.
        cycles: Most restarts, at least 1.
        block: Vectors iterated together, at least 2; clustered σ want more.
        depth: Krylov blocks between restarts, at least 2.

    Returns:
        JacobianStats.

    Raises:
        ValueError: No layers, a layer that changes the shape, an integer or empty h, or a
            parameter out of range.

    >>> import jax.numpy as jnp
    >>> layers = [lambda h: h * jnp.array([3.0, 1.0]), lambda h: h * jnp.array([1.0, 2.0])]
    >>> stats = jacobian_alignment(layers, jnp.ones(2))
    >>> print(stats.norms, stats.forward, stats.converged)
    [3. 2.] [0.] True

    References:
        arXiv 2602.01734 (MSign), Jacobian alignment and the lower bound on the product.
    """
    solve = lambda jacobian: leading_triple(jacobian, tolerance, cycles, block, depth)
    with jax.default_matmul_precision("highest"):
        triples = _stack([solve(jacobian) for jacobian in _linearise(layers, h)])
    return _stats(triples, triples, tolerance)


def cumulative_norms(
    layers: Sequence[Layer],
    h: ArrayLike,
    *,
    tolerance: float | int = 5e-4,
    cycles: int = 32,
    block: int = 4,
    depth: int = 4,
) -> JacobianStats:
    """The same for products: norms of P_l = J_l … J_1, and how each meets the layer after it.

    In the result `norms`, `residual` and `gap` (L,) are those of P_1 … P_L, and `forward` is
    |vᵀ u| with v of layer l + 1 and u of P_l. Since ‖J P‖₂ >= ‖J‖₂ ‖P‖₂ |v_Jᵀ u_P|, the bound
    (aM)^L/a with these alignments holds without further assumption. Costs of order L² products.

    Args:
        layers: As in `jacobian_alignment`.
        h: As in `jacobian_alignment`.
        tolerance: As in `jacobian_alignment`.
        cycles: As in `jacobian_alignment`.
        block: As in `jacobian_alignment`.
        depth: As in `jacobian_alignment`.

    Returns:
        JacobianStats, `converged` for layers and products together.

    Raises:
        ValueError: As `jacobian_alignment`.

    >>> import jax.numpy as jnp
    >>> layers = [lambda h: h * jnp.array([3.0, 1.0]), lambda h: h * jnp.array([1.0, 2.0])]
    >>> print(cumulative_norms(layers, jnp.ones(2)).norms.round(4))
    [3. 3.]
    """
    solve = lambda jacobian: leading_triple(jacobian, tolerance, cycles, block, depth)
    with jax.default_matmul_precision("highest"):
        jacobians = _linearise(layers, h)
        singles = [solve(jacobian) for jacobian in jacobians]
        products = [_compose(jacobians[: l + 1]) for l in range(1, len(jacobians))]
        chain = [singles[0], *(solve(product) for product in products)]
    return _stats(_stack(singles), _stack(chain), tolerance)


def _stats(later: SingularTriple, earlier: SingularTriple, tolerance: float | int) -> JacobianStats:
    """Aggregates from layers as the later, and layers or products as the earlier partner."""
    # A zero Jacobian has singular vectors of no meaning; NaN is left to spread.
    void = (later.sigma[1:] == 0) | (earlier.sigma[:-1] == 0)

    def cosine(a, b):
        value = jnp.minimum(jnp.abs(jnp.sum(a[1:] * b[:-1], 1)), 1.0)
        return jnp.where(void, jnp.zeros_like(value), value)

    forward = cosine(later.v, earlier.u)
    depth, weakest = later.sigma.shape[0], jnp.min(later.sigma)
    growth = jnp.min(forward, initial=1.0) * weakest
    settled = [error_angle(triple) <= tolerance for triple in (later, earlier)]
    return JacobianStats(
        norms=earlier.sigma,
        forward=forward,
        reversed=cosine(later.u, earlier.v),
        bound=growth ** (depth - 1) * weakest,
        growth=growth,
        danger=growth > 1,
        residual=earlier.residual,
        gap=earlier.gap,
        converged=jnp.all(jnp.stack(settled)),
    )


def _stack(triples: Sequence[SingularTriple]) -> SingularTriple:
    return SingularTriple(*(jnp.stack(leaves) for leaves in zip(*triples, strict=True)))


def _linearise(layers: Sequence[Layer], h: ArrayLike) -> list[LinearMap]:
    """The Jacobian of each layer at its own input, as maps of flat vectors."""
    point = jnp.asarray(h)
    if not jnp.issubdtype(point.dtype, jnp.floating) or point.size == 0:
        raise ValueError(f"jacobian: expected a non-empty float h, got {point.dtype} {point.shape}")
    if len(layers) == 0:
        raise ValueError("jacobian: expected at least one layer, got none")
    maps = []
    for index, layer in enumerate(layers):
        out, tangent = jax.linearize(layer, point)
        if out.shape != point.shape:
            raise ValueError(
                f"jacobian: expected layer {index} to keep the shape {point.shape}, got"
                f" {out.shape}; leave embedding and unembedding out"
            )
        maps.append(_flat_map(tangent, point, out))
        point = out
    return maps


def _flat_map(tangent: Layer, h: Array, out: Array) -> LinearMap:
    transpose = jax.linear_transpose(tangent, h)

    def product(x):
        return tangent(x.reshape(h.shape).astype(h.dtype)).ravel().astype(jnp.float32)

    def transposed(y):
        return transpose(y.reshape(out.shape).astype(out.dtype))[0].ravel().astype(jnp.float32)

    columns = lambda f: jax.vmap(f, in_axes=1, out_axes=1)
    return LinearMap(h.size, columns(product), columns(transposed))


def _compose(maps: Sequence[LinearMap]) -> LinearMap:
    """The product of maps, the first applied first."""

    def product(x):
        for jacobian in maps:
            x = jacobian.product(x)
        return x

    def transposed(y):
        for jacobian in reversed(maps):
            y = jacobian.transposed(y)
        return y

    return LinearMap(maps[0].size, product, transposed)
