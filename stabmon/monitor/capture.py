"""Captures intermediates as a model is traced, without a change of its signatures.

`watch_attention` wraps an attention function, `record` takes any other array, `capture` collects
what they see. What the names mean is in `intermediates.py`. A model that sows needs none of this.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from stabmon.metrics.attention import attention_entropy, max_attention_logit
from stabmon.monitor.intermediates import read_intermediates

_OPEN: ContextVar["Captured | None"] = ContextVar("stabmon_capture", default=None)
_QUERIES = 128
# Arguments of attention functions that change no logit.
_HARMLESS = frozenset(
    "dropout_rng dropout_rate broadcast_dropout deterministic dtype precision module "
    "force_fp32_for_softmax einsum_dot_general einsum qk_attn_weights_einsum "
    "attn_weights_value_einsum promote_dtype implementation return_residual".split()
)


class Captured:
    """What was recorded between the beginning and the end of a `capture`."""

    def __init__(self) -> None:
        """Begins empty."""
        self._found: dict[str, list[Array]] = {}

    def add(self, arrays: dict[str, Array]) -> None:
        """Takes arrays of one layer."""
        for name, x in arrays.items():
            self._found.setdefault(name, []).append(jax.lax.stop_gradient(jnp.asarray(x)))

    def layers(self) -> dict[str, Array]:
        """Each array stacked over layers, in the order in which they were recorded.

        Raises:
            ValueError: A name is unknown, or an array has other axes than its name says.
        """
        longest = max(map(len, self._found.values()), default=0)
        rows = [
            {name: xs[i] for name, xs in self._found.items() if i < len(xs)} for i in range(longest)
        ]
        return read_intermediates(rows)

    def layer(self) -> dict[str, Array]:
        """The arrays of one layer, for the body of a `jax.lax.scan`, which stacks them.

        Raises:
            ValueError: A name was recorded more than once.
        """
        for name, xs in self._found.items():
            if len(xs) > 1:
                raise ValueError(
                    f"capture: {name} was recorded {len(xs)} times, a layer has one; open a "
                    "capture in the body of the scan, or take layers() of all"
                )
        return {name: xs[0] for name, xs in self._found.items()}


@contextmanager
def capture() -> Iterator[Captured]:
    """Collects what watched attention functions and `record` see while a model is traced.

    It belongs inside the function that is jitted, differentiated, rematerialised or scanned, and
    what it collected leaves that function as one of its results, as any array does. Without an open
    capture nothing is computed. Captures nest; the innermost collects.

    >>> import jax, jax.numpy as jnp
    >>> attend = watch_attention(jax.nn.dot_product_attention)
    >>> def block(x, w):
    ...     with capture() as seen:
    ...         x = x + attend(x * w, x, x, is_causal=True)
    ...     return x, seen.layer()
    >>> _, intermediates = jax.lax.scan(block, jnp.ones((1, 8, 2, 4)), jnp.ones(3))
    >>> {name: x.shape for name, x in intermediates.items()}
    {'attention_entropy': (3, 2), 'max_attention_logit': (3, 2)}
    """
    seen = Captured()
    token = _OPEN.set(seen)
    try:
        yield seen
    finally:
        _OPEN.reset(token)


def record(**arrays: Array) -> None:
    """Gives arrays of one layer to the open `capture`; without one it does nothing.

    Args:
        **arrays: By the names that `Monitor` knows, without the layer axis: `residual=x` (B, T, D),
            `router_logits=z` (B, T, E).
    """
    if (seen := _OPEN.get()) is not None:
        seen.add(arrays)


def watch_attention(attend: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """An attention function that shows entropy and largest logit of its heads to `capture`.

    Its results are `attend`'s own. While a capture is open the logits are computed once more beside
    it, 128 queries at a time, in float32 and outside the gradient: use it where a sample is due.

    Args:
        attend: `attend(q, k, v, …) -> out` with q (B, T, N, H) and k (B, S, K, H), K dividing N:
            `jax.nn.dot_product_attention`, Flax's `dot_product_attention` (`attention_fn=` of its
            modules), or a kernel. Its arguments `mask`, `bias`, `is_causal` and `scale` are
            understood under these names.
        **settings: What `attend` does without being told by an argument: `is_causal=True`,
            `scale=1.0`.

    Raises:
        ValueError: In a capture, an argument that changes logits is not understood.
    """
    signature = inspect.signature(attend)
    if unknown := settings.keys() - {"mask", "bias", "is_causal", "scale"}:
        raise ValueError(
            f"watch_attention: unknown settings {sorted(unknown)}; known are mask, bias, "
            "is_causal, scale"
        )

    @wraps(attend)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if _OPEN.get() is not None:
            bound = signature.bind(*args, **kwargs).arguments
            bound = {**bound, **bound.pop("kwargs", {})}
            q, k, _, *_ = bound.values()
            said = {name: x for name, x in [*bound.items()][3:] if x is not None and x is not False}
            given = {name: x for name, x in said.items() if name not in _HARMLESS}
            record(**_statistics(q, k, **(settings | given)))
        return attend(*args, **kwargs)

    return watched


def _statistics(
    q: Float[Array, "*batch T N H"],
    k: Float[Array, "*batch S K H"],
    mask: Any = None,
    bias: Any = None,
    is_causal: bool = False,
    scale: float | int | None = None,
    **unknown: Any,
) -> dict[str, Float[Array, " N"]]:
    """Entropy and largest logit of each head, over all sequences and queries."""
    if unknown:
        raise ValueError(
            f"watch_attention: {sorted(unknown)} may change the logits; compute the statistics "
            "where these are known, and record(attention_entropy=…, max_attention_logit=…)"
        )
    q, k = (jax.lax.stop_gradient(x).astype(jnp.float32) for x in (q, k))
    (queries, heads, width), (keys, groups, _) = q.shape[-3:], k.shape[-3:]
    q, k = q.reshape(-1, *q.shape[-3:]), k.reshape(-1, *k.shape[-3:])
    scale = 1.0 / math.sqrt(width) if scale is None else scale
    count = q.shape[0]
    visible = _four(mask, count)
    shift = _four(bias if bias is None else jax.lax.stop_gradient(bias), count)
    size = min(_QUERIES, queries)
    blocks = -(-queries // size)

    def block(at: Array) -> tuple[Array, Array, Array]:
        """Sum of entropies, rows and largest logit of a few queries of one sequence."""
        batch, first = at // blocks, at % blocks * size
        # The last block begins early where it would end late; what is there twice is hidden.
        start = jnp.minimum(first, queries - size)
        rows = start + jnp.arange(size, dtype=at.dtype)
        mine = jax.lax.dynamic_slice_in_dim(q[batch], start, size, axis=0)
        grouped = mine.reshape(size, groups, heads // groups, width)
        logits = jnp.einsum("tkgh,skh->kgts", grouped, k[batch]).reshape(heads, size, keys) * scale
        seen = jnp.broadcast_to((rows >= first)[None, :, None], logits.shape)
        if shift is not None:
            logits = logits + _part(shift, batch, start, size).astype(jnp.float32)
        if visible is not None:
            seen = seen & _part(visible, batch, start, size).astype(bool)
        if is_causal:
            seen = seen & (rows[:, None] >= jnp.arange(keys, dtype=at.dtype)[None])[None]
        return _reduced(logits, seen)

    entropy, rows, top = jax.lax.map(block, jnp.arange(count * blocks, dtype=jnp.int32))
    total = jnp.sum(rows, 0)
    of_seen = lambda x: jnp.where(total > 0, x, jnp.full_like(x, jnp.nan))
    return {
        "attention_entropy": of_seen(jnp.sum(entropy, 0) / jnp.maximum(total, 1.0)),
        "max_attention_logit": of_seen(jnp.max(top, 0)),
    }


def _four(x: Any, batch: int) -> Array | None:
    """A mask or bias with the axes (B, N, T, S), each of them 1 where it is shared."""
    if x is None:
        return None
    x = jnp.asarray(x)
    x = x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x.reshape(-1, *x.shape[-3:])
    if x.shape[0] not in (1, batch):
        raise ValueError(f"watch_attention: a mask or bias {x.shape} for {batch} sequences")
    return x


def _part(x: Array, batch: Array, start: Array, size: int) -> Array:
    """Of a mask or bias the queries from `start` of one sequence."""
    one = x[batch] if x.shape[0] > 1 else x[0]
    return jax.lax.dynamic_slice_in_dim(one, start, size, axis=1) if one.shape[1] > 1 else one


def _reduced(
    logits: Float[Array, "N t S"], seen: Bool[Array, "N t S"]
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
    """Sum of the rows' entropies, number of rows that see a key, largest logit, by head."""
    rows = jnp.sum(jnp.any(seen, -1), -1).astype(jnp.float32)
    entropy, top = attention_entropy(logits, seen), max_attention_logit(logits, seen)
    there = rows > 0
    floor = jnp.full_like(top, jnp.finfo(jnp.float32).min)
    total = jnp.where(there, entropy * rows, jnp.zeros_like(rows))
    return total, rows, jnp.where(there, top, floor)
