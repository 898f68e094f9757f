"""Norms, ratios and counts of one array: the cheap symptoms read from gradients and updates.

Everything here is elementwise work and one reduction. Which array of a tree is the first offender
is told by `stabmon.monitor`; spectra live in `spectrum.py` and `updates.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from stabmon.linalg.checks import all_finite, as_float, nan_unless, unit_scale


class NoiseScale(NamedTuple):
    """Gradient noise scale and its two parts, each a float32 scalar.

    Attributes:
        noise_scale: tr Σ/‖G‖², in samples: the batch size past which averaging stops paying.
        trace: Estimate of tr Σ, the summed per-sample gradient variance.
        gradient_sq: Estimate of ‖G‖² of the true gradient; noise can make it negative.
    """

    noise_scale: Float[Array, ""]
    trace: Float[Array, ""]
    gradient_sq: Float[Array, ""]


def norm(x: ArrayLike) -> Float[Array, ""]:
    """Euclidean norm ‖x‖ = √Σx² of all entries (Frobenius for a matrix), at least 0.

    Scaled by the largest entry, so no square overflows or underflows. Zero or empty array: 0. A
    non-finite entry: NaN.

    Args:
        x: Array (...) of any float dtype.

    Raises:
        ValueError: `x` is not of a floating dtype.

    >>> import jax.numpy as jnp
    >>> print(norm(jnp.array([3e30, 4e30])))
    5e+30
    """
    x = as_float(x, "norm")
    if x.size == 0:
        return jnp.zeros((), jnp.float32)
    unit, scale = unit_scale(x)
    return nan_unless(all_finite(x), scale * jnp.sqrt(jnp.sum(jnp.square(unit))))


def root_mean_square(x: ArrayLike) -> Float[Array, ""]:
    """Root mean square ‖x‖/√size of all entries, at least 0.

    Zero or empty array: 0. A non-finite entry: NaN.

    Args:
        x: Array (...) of any float dtype.

    Raises:
        ValueError: `x` is not of a floating dtype.

    >>> import jax.numpy as jnp
    >>> print(root_mean_square(jnp.full((4, 5), -3.0)))
    3.0
    """
    x = as_float(x, "root_mean_square")
    return norm(x) / max(x.size, 1) ** 0.5


def update_ratio(update: ArrayLike, param: ArrayLike) -> Float[Array, ""]:
    """Size of a step against what it changes, ‖ΔW‖/‖W‖, at least 0; near 1e-3 in healthy runs.

    Zero parameter (a bias or W_Q at initialisation): 0, there is nothing to compare with. A
    non-finite entry: NaN.

    Args:
        update: Step ΔW as added to the parameter, any shape and float dtype.
        param: Parameter W of the same shape.

    Raises:
        ValueError: The shapes differ, or a dtype is not floating.

    >>> import jax.numpy as jnp
    >>> w = jnp.ones((8, 8))
    >>> print(f"{update_ratio(-1e-3 * w, w):.4f}")
    0.0010
    """
    update, param = as_float(update, "update_ratio"), as_float(param, "update_ratio")
    _same_shape("update_ratio", update=update, param=param)
    return _ratio(norm(update), norm(param))


def nonfinite_count(x: ArrayLike) -> Int[Array, ""]:
    """Number of NaN and ±∞ entries, int32; 0 for an empty or an integer array.

    Args:
        x: Array (...) of any dtype.

    >>> import jax.numpy as jnp
    >>> print(nonfinite_count(jnp.array([1.0, jnp.nan, -jnp.inf])))
    2
    """
    return jnp.sum(~jnp.isfinite(jnp.asarray(x)), dtype=jnp.int32)


def adam_update_rms(
    grad: ArrayLike, second_moment: ArrayLike, eps: float | int = 1e-8
) -> Float[Array, ""]:
    """How far Adam's second moment lags behind the gradient, √mean(g²/max(v, ε²)), at least 0.

    About 1 when v tracks g². Loss spikes follow 1–8 steps after it rises well above 1, that is
    after v has underestimated g². Invariant to a common scale of g, √v and ε. Zero gradient: 0. A
    non-finite entry or a negative v: NaN.

    Args:
        grad: Gradient g, any shape and float dtype, as the optimizer received it.
        second_moment: Adam's v of the same shape, after bias correction.
        eps: Adam's ε, positive, in units of the gradient.

    Raises:
        ValueError: The shapes differ, a dtype is not floating, or `eps` is not positive.

    >>> import jax.numpy as jnp
    >>> g = jnp.array([0.3, -0.6])
    >>> print(f"{adam_update_rms(g, g**2 / 4):.4f}")
    2.0000

    References:
        arXiv 2304.13013 (StableAdamW), RMS_t.
    """
    _positive_eps("adam_update_rms", eps)
    grad = as_float(grad, "adam_update_rms")
    second_moment = as_float(second_moment, "adam_update_rms")
    _same_shape("adam_update_rms", grad=grad, second_moment=second_moment)
    rms = root_mean_square(grad / jnp.maximum(jnp.sqrt(second_moment), eps))
    return nan_unless(jnp.all(jnp.isfinite(second_moment)), rms)


def gradient_rms_over_epsilon(grad: ArrayLike, eps: float | int = 1e-8) -> Float[Array, ""]:
    """Gradient RMS in units of Adam's ε, at least 0.

    Near or below 1, ε dominates the denominator and the update of this parameter dies. Zero
    gradient: 0. A non-finite entry: NaN.

    Args:
        grad: Gradient, any shape and float dtype.
        eps: Adam's ε, positive.

    Raises:
        ValueError: The dtype is not floating, or `eps` is not positive.

    >>> import jax.numpy as jnp
    >>> print(f"{gradient_rms_over_epsilon(jnp.full(4, 1e-7)):.1f}")
    10.0

    References:
        arXiv 2309.14322 (small-scale proxies), parameters whose gradient falls to ε.
    """
    _positive_eps("gradient_rms_over_epsilon", eps)
    return root_mean_square(grad) / eps


def gradient_noise_scale(
    small_norm_sq: ArrayLike, big_norm_sq: ArrayLike, small_batch: int, big_batch: int
) -> NoiseScale:
    """Simple noise scale tr Σ/‖G‖² from gradient norms at two batch sizes.

    E‖G_B‖² = ‖G‖² + tr Σ/B, solved for both unknowns. Each part is unbiased and their ratio is
    not: average the two squared norms over tens of steps before the call. Zero norms: all 0. Where
    the estimate of ‖G‖² is not positive, the scale is NaN: noise hides the gradient, average more.
    A non-finite norm: NaN.

    Args:
        small_norm_sq: ‖G‖² of the gradient of `small_batch` samples, scalar.
        big_norm_sq: ‖G‖² of the gradient of `big_batch` samples, scalar.
        small_batch: Samples in the small batch, at least 1.
        big_batch: Samples in the big batch, more than `small_batch`.

    Raises:
        ValueError: `small_batch` < 1 or `big_batch` <= `small_batch`.

    >>> import jax.numpy as jnp
    >>> print(gradient_noise_scale(jnp.float32(6.0), jnp.float32(3.0), 1, 4).noise_scale)
    2.0

    References:
        arXiv 1812.06162, the simple noise scale (section 2) and its estimate (appendix A.1).
    """
    if not 1 <= small_batch < big_batch:
        raise ValueError(
            "gradient_noise_scale: expected 1 <= small_batch < big_batch, got"
            f" {small_batch} and {big_batch}"
        )
    small = as_float(small_norm_sq, "gradient_noise_scale")
    big = as_float(big_norm_sq, "gradient_noise_scale")
    finite = all_finite(small, big)
    gradient_sq = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    trace = (small - big) / (1 / small_batch - 1 / big_batch)
    hidden = (gradient_sq <= 0) & ((small != 0) | (big != 0))
    scale = _ratio(trace, gradient_sq)
    return NoiseScale(
        noise_scale=nan_unless(finite & ~hidden, scale),
        trace=nan_unless(finite, trace),
        gradient_sq=nan_unless(finite, gradient_sq),
    )


def log_z_squared(logits: ArrayLike) -> Float[Array, ""]:
    """Mean over rows of (log Z)², log Z = logsumexp of the last axis: the z-loss, unweighted.

    At least 0. It grows when logits drift together, which softmax and so the loss do not see. All
    logits zero: (ln n)² for n classes. A non-finite entry: NaN.

    Args:
        logits: Array (..., n) of any float dtype.

    Raises:
        ValueError: `logits` has no axis, is empty, or is not of a floating dtype.

    >>> import jax.numpy as jnp
    >>> print(f"{log_z_squared(jnp.full((2, 1), 3.0)):.4f}")
    9.0000

    References:
        arXiv 2309.14322, output-logit divergence and z-loss; arXiv 2202.08906 for routers.
    """
    logits = as_float(logits, "log_z_squared")
    if logits.ndim == 0 or logits.size == 0:
        raise ValueError(
            f"log_z_squared: expected non-empty logits (..., n), got shape {logits.shape};"
            " the last axis is the classes"
        )
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return nan_unless(all_finite(logits), jnp.mean(jnp.square(log_z)))


def _ratio(a: Float[Array, ""], b: Float[Array, ""]) -> Float[Array, ""]:
    """a/b, or 0 where b = 0."""
    return jnp.where(b == 0, jnp.zeros_like(a), a / jnp.where(b == 0, jnp.ones_like(b), b))


def _positive_eps(name: str, eps: float | int) -> None:
    if not eps > 0:
        raise ValueError(f"{name}: expected eps > 0, got {eps}; pass the optimizer's eps, say 1e-8")


def _same_shape(name: str, **arrays: Float[Array, "..."]) -> None:
    shapes = {key: array.shape for key, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{name}: expected arrays of one shape, got {shapes}")
