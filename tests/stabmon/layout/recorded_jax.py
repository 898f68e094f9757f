"""Parameters as JAX libraries make them: paths and shapes, and where one head lies in them.

Recorded from Tunix 0.1.7, EasyDeL 0.3.0, Flax 0.12 and Equinox 0.13, and read in the sources of
MaxText 0.2.5. What an entry is, and those of `transformers`, is `recorded.py`.
"""

import numpy as np

from tests.stabmon.layout.recorded import TORCH, Leaves, Recorded, Slice, centred, rows
from tests.stabmon.trees import VOCABULARY, C, D, E, F, H, K, N, P, R, V

_EASY, _MAX = "model/layers/{}/self_attn", "params/decoder/{}"
_GEMMA2 = {
    f"params/decoder/layers/self_attention_{kind}/{name}/kernel": (D, 1, n, H)
    for kind in ("local", "global")
    for name, n in (("query", N), ("key", K), ("value", K))
}
_LATENT = {"wq_a/kernel": (D, R), "q_norm/scale": (R,), "wq_b/kernel": (R, N, H + P)}
_LATENT |= {"wkv_a/kernel": (D, C + P), "kv_norm/scale": (C,), "wkv_b/kernel": (C, N, H + V)}
_LATENT |= {"out/kernel": (N, V, D)}


def _latent(up: str, norm: str, width: int, i: int) -> Slice:
    """Down, scale and up of MaxText's layers with experts, of which the first is layer 1."""
    at = "params/decoder/moe_layers/self_attention"

    def matrix(t: Leaves) -> np.ndarray:
        down = t[f"{at}/{'wq_a' if width == R else 'wkv_a'}/kernel"][:, 0, :width]
        return down * t[f"{at}/{norm}/scale"][:, 0] @ t[f"{at}/{up}/kernel"][:, 0, i, :H]

    return matrix


def columns(name: str, start: int) -> Slice:
    """H columns of a kernel, in × out, from one on."""
    return lambda t: t[name][:, start : start + H]


RECORDED = TORCH | {
    "easydel": Recorded(
        "EasyDeL Llama",
        {f"{_EASY}/q_proj/kernel": (D, N * H), f"{_EASY}/k_proj/kernel": (D, K * H)},
        columns(_EASY.format(1) + "/q_proj/kernel", 4 * H),
        columns(_EASY.format(1) + "/k_proj/kernel", H),
    ),
    "tunix": Recorded(
        "Tunix",
        {
            "layers/{}/attn/q_proj/w": (D, N, H),
            "layers/{}/attn/k_proj/w": (D, K, H),
            "layers/{}/attn/q_norm/w": (H,),
            "layers/{}/attn/k_norm/w": (H,),
        },
        lambda t: t["layers/1/attn/q_proj/w"][:, 4] * t["layers/1/attn/q_norm/w"],
        lambda t: t["layers/1/attn/k_proj/w"][:, 1] * t["layers/1/attn/k_norm/w"],
        {},
    ),
    "flax": Recorded(
        "Flax MultiHeadAttention",
        {
            f"params/Block_{{}}/MultiHeadDotProductAttention_0/{x}": shape
            for x, shape in {
                "query/kernel": (D, N, H),
                "key/kernel": (D, N, H),
                "query_ln/scale": (H,),
                "key_ln/scale": (H,),
                "query/bias": (N, H),
            }.items()
        },
        lambda t: (
            centred(t["params/Block_1/MultiHeadDotProductAttention_0/query/kernel"][:, 4])
            * t["params/Block_1/MultiHeadDotProductAttention_0/query_ln/scale"]
        ),
        lambda t: (
            centred(t["params/Block_1/MultiHeadDotProductAttention_0/key/kernel"][:, 1])
            * t["params/Block_1/MultiHeadDotProductAttention_0/key_ln/scale"]
        ),
        {},
    ),
    "equinox": Recorded(
        "Equinox MultiheadAttention",
        {f"blocks/{{}}/attn/{x}_proj/weight": (N * H, D) for x in ("query", "key", "value")}
        | {"blocks/{}/attn/output_proj/weight": (D, N * H)},
        rows("blocks/1/attn/query_proj/weight", 4 * H),
        rows("blocks/1/attn/key_proj/weight", H),
    ),
    "maxtext-unscanned": Recorded(
        "MaxText, not scanned",
        {
            f"{_MAX.format('layers_{}')}/self_attention/query/kernel": (D, N, H),
            f"{_MAX.format('layers_{}')}/self_attention/key/kernel": (D, K, H),
            "params/token_embedder/embedding": (VOCABULARY, D),
        },
        lambda t: t["params/decoder/layers_1/self_attention/query/kernel"][:, 4],
        lambda t: t["params/decoder/layers_1/self_attention/key/kernel"][:, 1],
        {},
    ),
    "maxtext-fused": Recorded(
        "MaxText",
        {
            "params/decoder/layers/self_attention/qkv_proj/kernel": (D, 2, N + 2 * K, H),
            "params/decoder/layers/mlp/wo/kernel": (F, 2, D),
        },
        lambda t: t["params/decoder/layers/self_attention/qkv_proj/kernel"][:, 1, 4],
        lambda t: t["params/decoder/layers/self_attention/qkv_proj/kernel"][:, 1, N + 1],
    ),
    "maxtext-gemma2": Recorded(
        "MaxText Gemma 2",
        _GEMMA2,
        lambda t: t["params/decoder/layers/self_attention_global/query/kernel"][:, 0, 4],
        lambda t: t["params/decoder/layers/self_attention_global/key/kernel"][:, 0, 1],
        {},
    ),
    "maxtext-blocks": Recorded(
        "MaxText, blocks of layers",
        {
            f"params/decoder/{at}/self_attention/{name}/kernel": shape
            for at, stack in (("layers/layers_{}", (3,)), ("layers_remainder/layers_0", ()))
            for name, n in (("query", N), ("key", K))
            for shape in [(D, *stack, n, H)]
        },
        lambda t: t["params/decoder/layers/layers_1/self_attention/query/kernel"][:, 0, 4],
        lambda t: t["params/decoder/layers/layers_1/self_attention/key/kernel"][:, 0, 1],
        {},
    ),
    "maxtext-deepseek": Recorded(
        "MaxText DeepSeek",
        {
            f"params/decoder/{at}/self_attention/{name}": (shape[0], count, *shape[1:])
            for at, count in (("dense_layers", 1), ("moe_layers", 2))
            for name, shape in _LATENT.items()
        }
        | {"params/decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel": (D, 2, E)},
        _latent("wq_b", "q_norm", R, 4),
        _latent("wkv_b", "kv_norm", C, 1),
        {},
        ("its part p", "wq_b", "wkv_a"),
    ),
}
