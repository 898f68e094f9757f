"""Leaves beside queries and keys that no rule takes, and that may change their product.

A norm of q or k under a name that no rule knows, a scale that is not folded, a factor, an adapter:
with one of them every number of the product would be wrong without a sign of it. What is known to
leave the product alone, such as biases and whatever turns positions, is listed here by name.
Everything else makes a layout refuse.
"""

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from stabmon.layout.match import Found
from stabmon.layout.rules import FACTORS, GROUPS, SCALES, path_regex

# Within the attention module: biases and buffers; positions; what acts on values, the output or
# the probabilities; state of randomness and caches.
_HARMLESS = re.compile(
    r"(^|[/_])(biases|bias|b|masked_bias|attention_biases"
    r"|inv_freq|rope|rotary\w*|rel\w*_pos\w*|relative_\w+|alibi\w*|freqs?\w*|cos|sin|angles"
    r"|v|vs|value|values|wv|v_proj|value_proj|v_\w*norm|value_\w*norm"
    r"|o|out|wo|proj|c_proj|dense|out_proj|output_proj|o_\w*norm|out\w*_norm|sub_norm|g_norm"
    r"|inner_attn_ln|gate\w*|\w+_gate|g_proj|sinks?|indexer|rngs?|dropout\w*|cache\w*|key_data)"
    r"(/(weight|kernel|scale|w|value|bias|count|key))*$|(^|/)(indexer|rngs|dropout\w*)/"
)
# Outside of it, within the layer: names of query-key norms.
_NORM = re.compile(
    r"(^|[/_])(q|k|qk|kq|query|key|queries|keys)_?(layer_?norm|norm|rms_?norm|ln|scale|gain)\w*"
    r"(/(?!bias)|$)"
)
_MATRICES = {x for role in "qk" for x in FACTORS[role] if x not in SCALES}


def refuse_suspects(
    name: str, ignores: Sequence[str], found: Sequence[Found], leaves: Iterable[tuple[str, Any]]
) -> None:
    """Refuses a layout that leaves out what may change the product of queries and keys.

    Args:
        name: Of the layout, for messages.
        ignores: Paths, as in `Rule`, that are known not to.
        found: Leaves that it takes.
        leaves: All leaves.

    Raises:
        ValueError: There is such a leaf, or weights are integers.
    """
    leaves = list(leaves)
    for item in found:
        if str(item.leaf.dtype).startswith(("int", "uint")):
            raise ValueError(
                f"layout {name!r}: {item.path} is of dtype {item.leaf.dtype}: quantised, so its "
                "entries are no weights; pass the tree of weights in floating point"
            )
    modules, taken = _modules(found), {item.path for item in found}
    known = [path_regex(path) for path in ignores]
    rest = [(path, leaf) for path, leaf in leaves if path not in taken]
    rest = [(path, x) for path, x in rest if not any(r.search(_slashed(path)) for r in known)]
    if suspects := [(path, leaf) for path, leaf in rest if _suspect(_slashed(path), modules)]:
        path, leaf = suspects[0]
        more = f" and {len(suspects) - 1} more" if len(suspects) > 1 else ""
        star = re.sub(r"(?<![^/])\d+(?![^/])", "*", _slashed(path), count=1)
        raise ValueError(
            f"layout {name!r} fits, but {path} {tuple(leaf.shape)}{more} beside queries and keys "
            "is in none of its rules; if it is a norm of q or k, every number of their product "
            f"would be wrong. Say what it is: find_layout(params, rules=(Rule('q_scale', {star!r}, "
            f"'h -> h'),)), or that it is nothing of the kind: find_layout(params, "
            f"ignores=({star!r},))"
        )


def _slashed(path: str) -> str:
    return path.replace(".", "/")


def _suspect(path: str, modules: Sequence[tuple[str, str, bool]]) -> bool:
    """Whether a leaf that no rule takes may change the product of queries and keys."""
    for layer, module, is_whole_layer in modules:
        inside = path.removeprefix(f"{module}/")
        if inside != path and not is_whole_layer and not _HARMLESS.search(inside):
            return True
        inside = path.removeprefix(f"{layer}/")
        if (inside != path or not layer) and _NORM.search(inside):
            return True
    return False


def _modules(found: Sequence[Found]) -> list[tuple[str, str, bool]]:
    """Of each layer: its path, that of its attention, and whether that holds other matrices too."""
    groups: dict[Any, list[Found]] = {}
    for item in found:
        if _MATRICES.intersection(item.rule.roles):
            groups.setdefault((item.layers, item.rule.layers), []).append(item)
    modules = []
    attention = {*GROUPS["attention"], *SCALES}
    others = [_slashed(x.path) for x in found if not attention.intersection(x.rule.roles)]
    for items in groups.values():
        paths = [_slashed(item.path) for item in items]
        module = os.path.commonpath([os.path.dirname(path) for path in paths])
        if len({*paths}) == 1:
            module = os.path.dirname(module)
        after = items[0].rule.path.rpartition("*")[2].count("/")
        whole = paths[0].rsplit("/", after)[0] if items[0].place else os.path.dirname(module)
        shared = not module or any(x.startswith(f"{module}/") for x in others)
        modules.append((whole, module, shared or len(module) <= len(whole)))
    return modules
