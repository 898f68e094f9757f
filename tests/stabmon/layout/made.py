"""The storage formats that presets are tested on, by a short name."""

from tests.stabmon import trees as jaxlib
from tests.stabmon.layout import state_dicts as torch
from tests.stabmon.trees import C, D, H, K, Library, N, R, V

LIBRARIES = {
    "scanned": Library("scanned GPT", jaxlib.scanned, jaxlib.plant_scanned),
    "scanned-moe": Library("scanned GPT", lambda: jaxlib.scanned(moe=True), jaxlib.plant_scanned),
    "scanned-norm": Library(
        "scanned GPT",
        lambda: jaxlib.scanned(norm=True),
        jaxlib.plant_scanned,
        jaxlib.effect_scanned,
    ),
    "scanned-mla": Library(
        "scanned GPT with latent attention",
        jaxlib.scanned_mla,
        jaxlib.plant_scanned_mla,
        jaxlib.effect_scanned_mla,
        heads=(N, N),
        latent=(R, C),
    ),
    "gemma": Library(
        "Flax Gemma", jaxlib.flax_gemma, jaxlib.plant_flax_gemma, jaxlib.effect_flax_gemma
    ),
    "gemma-mha": Library(
        "Flax Gemma",
        lambda: jaxlib.flax_gemma(fused=True),
        jaxlib.plant_flax_gemma,
        jaxlib.effect_flax_gemma,
        heads=(N, N),
    ),
    "maxtext": Library("MaxText", jaxlib.maxtext, jaxlib.plant_maxtext, jaxlib.effect_maxtext),
    "maxtext-mixtral": Library(
        "MaxText",
        lambda: jaxlib.maxtext("MoeBlock_0"),
        jaxlib.plant_maxtext,
        jaxlib.effect_maxtext,
    ),
    "maxtext-qwen": Library(
        "MaxText",
        lambda: jaxlib.maxtext("moe_block"),
        jaxlib.plant_maxtext,
        jaxlib.effect_maxtext,
    ),
    "levanter": Library("Levanter", jaxlib.levanter, jaxlib.plant_levanter, jaxlib.effect_levanter),
    "levanter-gpt2": Library(
        "Levanter GPT-2", jaxlib.levanter_gpt2, jaxlib.plant_levanter_gpt2, heads=(N, N)
    ),
    "nanodo": Library("nanodo", jaxlib.nanodo, jaxlib.plant_nanodo, heads=(N, N)),
    "llama": Library(
        "Hugging Face Llama", torch.torch_llama, torch.plant_llama, sizes={"heads": N}
    ),
    "qwen2": Library(
        "Hugging Face Llama",
        lambda: torch.torch_llama(bias=True),
        torch.plant_llama,
        sizes={"heads": N, "kv_heads": K},
    ),
    "qwen2-moe": Library(
        "Hugging Face Llama",
        lambda: torch.torch_llama(torch.QWEN_MOE, bias=True),
        torch.plant_llama,
        sizes={"heads": N},
    ),
    "mixtral": Library(
        "Hugging Face Llama",
        lambda: torch.torch_llama(torch.MIXTRAL),
        torch.plant_llama,
        sizes={"heads": N},
    ),
    "qwen3": Library(
        "Hugging Face Llama",
        lambda: torch.torch_llama(norm=(H, H)),
        torch.plant_llama,
        torch.effect_llama(H),
    ),
    "olmo2": Library(
        "Hugging Face OLMo 2",
        lambda: torch.torch_llama(norm=(N * H, K * H)),
        torch.plant_llama,
        torch.effect_llama(N * H),
        sizes={"heads": N},
    ),
    "gemma3": Library(
        "Hugging Face Gemma",
        lambda: torch.torch_llama(norm=(H, H), gemma=True),
        torch.plant_llama,
        torch.effect_llama(H, plus=1.0),
    ),
    "gpt2": Library(
        "Hugging Face GPT-2", torch.gpt2, torch.plant_gpt2, sizes={"heads": N}, heads=(N, N)
    ),
    "gpt-neox": Library(
        "Hugging Face GPT-NeoX",
        torch.gpt_neox,
        torch.plant_gpt_neox,
        sizes={"heads": N},
        heads=(N, N),
    ),
    "deepseek": Library(
        "DeepSeek",
        torch.deepseek,
        torch.plant_deepseek,
        torch.effect_deepseek,
        sizes={"heads": N},
        heads=(N, N),
        latent=(R, C),
        value=V,
    ),
    "deepseek-lite": Library(
        "DeepSeek",
        lambda: torch.deepseek(lora=False),
        torch.plant_deepseek,
        torch.effect_deepseek,
        sizes={"heads": N},
        heads=(N, N),
        latent=(D, C),
        value=V,
    ),
}
