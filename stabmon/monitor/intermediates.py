"""What a forward pass shows to the monitors: names, axes, and the one form that tiers read.

A trainer's captured arrays are found, stacked over layers and checked here. What is measured on
them lives in `tiers.py` and `routing.py`, how an attention function is watched in `capture.py`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from stabmon.layout import leaves_with_paths

Seen = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Intermediates = Seen | Callable[[], Seen] | None

# Axes by the README's glossary; "..." are those of tokens.
AXES = {
    "attention_entropy": "L N",
    "max_attention_logit": "L N",
    "sink_mass": "L N",
    "repeated_maximum": "L N",
    "residual": "L ... D",
    "router_logits": "L ... E",
    "router_probabilities": "L ... E",
    "router_lm_gradient": "L E",
    "dropped": "L",
    "tokens": "B T",
    "mask": "B T",
    # Captured by models for other readers; no tier reads them.
    "query": "L ... N H",
    "value": "L ... K H",
    "expert_load": "L E",
}
# Arrays whose layers are those of one role, and what the role calls their last axis.
_OF_ROLE = {
    **dict.fromkeys(("attention_entropy", "max_attention_logit"), ("q", "N")),
    **dict.fromkeys(("sink_mass", "repeated_maximum"), ("q", "N")),
    "residual": ("q", "D"),
    **dict.fromkeys(("router_logits", "router_probabilities"), ("router", "E")),
    "router_lm_gradient": ("router", "E"),
}


def read_intermediates(
    seen: Seen | None, places: Mapping[str, Mapping[str, int]] | None = None
) -> dict[str, Array]:
    """The captured arrays by name, stacked over layers and checked.

    Args:
        seen: {name: array}; or a list of these, one a layer, without the layer axis; or what a
            module captured, see `collect_intermediates`.
        places: Sizes of the axes of the roles "q" and "router", where they are known.

    Raises:
        ValueError: A name is unknown, an array has other axes than its name says, or does not fit
            the parameters.

    >>> import jax.numpy as jnp
    >>> layers = [{"attention_entropy": jnp.ones(4)}, {"attention_entropy": jnp.zeros(4)}]
    >>> read_intermediates(layers)["attention_entropy"].shape
    (2, 4)
    """
    if seen is None:
        return {}
    if not isinstance(seen, Mapping):
        seen = _stacked(seen)
    elif any(_nested(x) for x in seen.values()):
        seen = collect_intermediates(seen)
    for name in seen:
        if name not in AXES:
            raise ValueError(f"intermediates: {_unknown(name)}")
    found = {name: jnp.asarray(x) for name, x in seen.items() if x is not None}
    for name, x in found.items():
        _check_axes(name, x)
    if "router_logits" in found and "router_probabilities" in found:
        raise ValueError(
            "intermediates: router_logits and router_probabilities are both there; give one, the "
            "logits where the router has them"
        )
    for name, x in found.items():
        role, axis = _OF_ROLE.get(name, ("", ""))
        sizes = (places or {}).get(role)
        if sizes and (x.shape[0], x.shape[-1]) != (sizes["L"], sizes[axis]):
            raise ValueError(
                f"intermediates: {name} ({AXES[name].replace(' ', ', ')}) has shape {x.shape}, but "
                f"the parameters' {role} has L={sizes['L']}, {axis}={sizes[axis]}; give every "
                "layer that has one, in order, and nothing before or after them"
            )
    _check_tokens(found)
    return found


def collect_intermediates(captured: PyTree, **patterns: str) -> dict[str, Array]:
    r"""The arrays that monitors read, from whatever a module captured.

    Takes linen's collection of `sow` or `capture_intermediates`, NNX's state of
    `nnx.Intermediate`, any tree of dicts, lists and tuples. What is sown under a name that the
    monitors know (`attention_entropy`, `residual`, …) is found by it, wherever it lies; the rest by
    a regular expression on its path. Arrays of several layers are stacked in the order of the
    numbers in their paths; one array that has its layers already (`nn.scan`) stays. Whatever else
    was captured is left alone. Outside the gradient.

    Args:
        captured: Linen's `variables["intermediates"]`, the second result of
            `nnx.capture(model, nnx.Intermediate)`, or the like.
        **patterns: name=regular expression, searched in the path without what `sow` adds to it:
            `residual=r"block_\d+/__call__"`.

    Raises:
        ValueError: Nothing was found, a pattern matches nothing, or a name is nearly right.

    >>> import jax.numpy as jnp
    >>> sown = {f"h_{i}": {"attn": {"attention_entropy": (jnp.full(4, i),)}} for i in (0, 10, 2)}
    >>> collect_intermediates(sown)["attention_entropy"][:, 0].tolist()
    [0, 2, 10]
    """
    for name in patterns:
        if name not in AXES:
            raise ValueError(f"collect_intermediates: {_unknown(name)}")
    leaves = [(_steps(path), x) for path, x in leaves_with_paths(captured)]
    paths = ["/".join(steps) for steps, _ in leaves]
    groups: dict[str, list[tuple[list[str], Any]]] = {}
    for (steps, x), path in zip(leaves, paths, strict=True):
        names = [name for name, pattern in patterns.items() if re.search(pattern, path)]
        sown = [step for step in steps if step in AXES and step not in patterns]
        for name in names or sown[-1:]:
            groups.setdefault(name, []).append((steps, x))
        if not names and not sown and (near := get_close_matches(steps[-1], AXES, 1, 0.85)):
            raise ValueError(f"collect_intermediates: {path} is near to {near[0]!r}; rename it")
    listed = ", ".join(dict.fromkeys(paths[:12])) or "nothing"
    for name, pattern in patterns.items():
        if name not in groups:
            raise ValueError(
                f"collect_intermediates: {name}={pattern!r} matches no path of {listed}"
            )
    if not groups:
        raise ValueError(
            f"collect_intermediates: none of the names that monitors read, {', '.join(AXES)}, "
            f"among what was captured: {listed}; sow under these names, or give a pattern: "
            "collect_intermediates(captured, residual=r'...')"
        )
    return jax.lax.stop_gradient({name: _one(name, of) for name, of in groups.items()})


def check_like_params(name: str, tree: PyTree | None, params: PyTree) -> None:
    """Raises ValueError for a tree with a leaf that is not among the parameters, or of other shape.

    A tree of some of the parameters, such as gradients of adapters alone, is fine.
    """
    of = dict(leaves_with_paths(params))
    for path, x in leaves_with_paths(tree):
        if path not in of:
            raise ValueError(
                f"{name}: {path!r} is not among the parameters ({', '.join([*of][:12])}, …); pass "
                f"the tree that `tx.update` takes, structured like the parameters"
            )
        if jnp.shape(x) != jnp.shape(of[path]):
            raise ValueError(
                f"{name}: {path} has shape {jnp.shape(x)}, the parameter has "
                f"{jnp.shape(of[path])}; pass the tree of this model's parameters"
            )


def _nested(x: Any) -> bool:
    """Whether it is a tree, and no array."""
    return x is not None and not jax.tree_util.all_leaves([x])


def _stacked(layers: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Arrays of every layer on one leading axis; a mask or tokens are those of the first."""
    names = dict.fromkeys(name for layer in layers for name in layer)
    for name in names:
        if name not in AXES:
            raise ValueError(f"intermediates: {_unknown(name)}")
    out = {}
    for name in names:
        there = [layer[name] for layer in layers if name in layer]
        shared = not AXES[name].startswith("L")
        out[name] = there[0] if shared else _stack(name, [jnp.asarray(x) for x in there])
    return out


def _stack(name: str, arrays: Sequence[Array]) -> Array:
    if len(shapes := {x.shape for x in arrays}) > 1:
        raise ValueError(f"intermediates: {name} differs between layers: {sorted(shapes)}")
    return jnp.stack(arrays)


def _steps(path: str) -> list[str]:
    """The steps of a path, without what `sow` makes: places in a tuple, a variable's `value`."""
    steps = path.split("/")
    while len(steps) > 1 and steps[-1].isdigit():
        steps = steps[:-1]
    inner = steps[-1] == "value" and any(step in AXES for step in steps[:-1])
    return steps[:-1] if inner else steps


def _one(name: str, of: Sequence[tuple[list[str], Any]]) -> Array:
    """Arrays of one name as one, layers in the order of the numbers in their paths."""
    number = lambda step: [(int(x) if x.isdigit() else -1, x) for x in re.split(r"(\d+)", step)]
    ordered = sorted(of, key=lambda item: [number(step) for step in item[0]])
    arrays = [jnp.asarray(x) for _, x in ordered]
    if not AXES[name].startswith("L"):
        return arrays[0]
    if len(arrays) == 1 and arrays[0].ndim >= _ranks(name)[0]:
        return arrays[0]  # a scan stacked it
    # The stacks of several scans lie one after another; what has no layer axis is stacked.
    whole = "..." not in AXES[name] and arrays[0].ndim == _ranks(name)[0]
    return jnp.concatenate(arrays) if whole else _stack(name, arrays)


def _ranks(name: str) -> tuple[int, bool]:
    """Least number of axes, and whether there may be more."""
    axes = AXES[name].split()
    return len(axes), "..." in axes


def _check_axes(name: str, x: Array) -> None:
    rank, more = _ranks(name)
    if x.ndim == rank or (more and x.ndim > rank):
        pass
    elif name in ("attention_entropy", "max_attention_logit", "sink_mass", "repeated_maximum"):
        raise ValueError(
            f"intermediates: expected {name} (L, N), one value a layer and head, got shape "
            f"{x.shape}; stack the layers, and reduce logits with stabmon.{name}"
        )
    else:
        axes = ", ".join(AXES[name].split())
        raise ValueError(
            f"intermediates: expected {name} ({axes}), got shape {x.shape}; stack the layers "
            "first: jnp.stack of one array a layer"
            if axes.startswith("L")
            else f"intermediates: expected {name} ({axes}), got shape {x.shape}"
        )
    kind = {"mask": jnp.bool_, "tokens": jnp.integer}.get(name, jnp.floating)
    if not jnp.issubdtype(x.dtype, kind):
        remedy = {
            "mask": "booleans, True where a token counts: write mask > 0",
            "tokens": "integer token ids",
        }.get(name, "a floating dtype: convert with .astype(jnp.float32)")
        raise ValueError(f"intermediates: {name} has dtype {x.dtype}; expected {remedy}")


def _check_tokens(found: Mapping[str, Array]) -> None:
    """Raises ValueError where a mask does not fit the tokens that were captured."""
    if "mask" not in found:
        return
    shape = found["mask"].shape
    for name, part in _token_axes(found):
        if part != shape:
            raise ValueError(
                f"intermediates: mask has shape {shape} (B, T), but {name} "
                f"{found[name].shape} has tokens {part}; expected {name} "
                f"({AXES[name].replace('...', 'B T').replace(' ', ', ')}) of the same tokens"
            )


def _token_axes(found: Mapping[str, Array]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("residual", "router_logits", "router_probabilities"):
        if name in found:
            yield name, found[name].shape[1:-1]
    if "tokens" in found:
        yield "tokens", found["tokens"].shape


def _unknown(name: str) -> str:
    near = get_close_matches(name, AXES, 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown name {name!r}{hint} Known are {', '.join(AXES)}"
