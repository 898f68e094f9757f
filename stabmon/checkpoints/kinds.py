"""What a checkpoint is that holds no weights as they are: quantised, or adapters alone.

What lives here: `refusal`, by the names and dtypes of arrays. What does not: which arrays are
parameters (`source`).
"""

import re
from collections.abc import Mapping

from stabmon.checkpoints.source import Leaf

# By a name that only this kind has; dtypes alone tell the rest.
_KINDS = (
    ("quantised with GPTQ", r"(^|[./])(qweight|g_idx)$", r"(^|[./])g_idx$"),
    ("quantised with AWQ or GPTQ", r"(^|[./])qweight$", r"(^|[./])qzeros$"),
    ("quantised to 4 bits by bitsandbytes", r"(absmax|quant_state)", r"quant_state\.bitsandbytes"),
    ("quantised to 8 bits by bitsandbytes", r"(^|[./])SCB$", r"(^|[./])SCB$"),
    ("quantised to MXFP4", r"_(blocks|scales)$", r"_blocks$"),
    ("quantised by compressed-tensors", r"weight_packed$", r"weight_packed$"),
)
_LORA = re.compile(r"(^|[._/])lora_([ab]|[AB]|embedding|down|up|kernel)")
_SCALE = re.compile(r"[./_](weight_scale_inv|weight_scale|input_scale|scale_inv)$")


def refusal(leaves: Mapping[str, Leaf]) -> str | None:
    """Returns why weights cannot be read off these arrays as they are, None if they can.

    Args:
        leaves: All arrays by path, of any dtype.

    Example:
        >>> refusal({"h.0.q.lora_A.weight": Leaf((2, 8), "float32")})
        'holds LoRA factors alone: merge them into the model first'
        >>> refusal({})
        'holds no arrays'
    """
    if not leaves:
        return "holds no arrays"
    for what, names, sure in _KINDS:
        if any(re.search(sure, path) for path in leaves):
            count = sum(1 for path in leaves if re.search(names, path))
            return f"is {what} ({count:,} arrays say so): convert it to floating point first"
    factors = [path for path in leaves if _LORA.search(path)]
    if factors and len(factors) == len(leaves):
        return "holds LoRA factors alone: merge them into the model first"
    if factors:
        return (
            f"holds {len(factors):,} LoRA factors beside its weights, {factors[0]!r} first: the "
            "model computes with their sum; merge them first"
        )
    scales = [path for path in leaves if _SCALE.search(path)]
    eight = [x for x, leaf in leaves.items() if leaf.dtype.startswith(("F8_E4", "F8_E5", "float8"))]
    if scales or eight:
        return (
            f"is quantised to 8-bit floats, {(scales or eight)[0]!r} first: its entries are no "
            "weights without their scales; convert it to bfloat16 first"
        )
    weights = [
        leaf
        for path, leaf in leaves.items()
        if len(leaf.shape) > 1
        and re.search(r"(^|[./])(weight|kernel|w)$", path)
        and re.fullmatch(r"[IU]\d+|u?int\d+", leaf.dtype)
    ]
    if weights:
        return f"is quantised to {weights[0].dtype}: convert it to floating point first"
    return None
