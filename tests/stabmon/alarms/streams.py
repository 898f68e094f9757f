"""Synthetic streams of samples with the keys that the monitor emits, for the tests of alarms."""

import numpy as np

LOSS = "symptoms/global/loss/value"
GRADIENT = "symptoms/global/grad_norm/value"
UPDATE = "symptoms/global/update_norm/value"
DELTA2 = "delta200/global/delta2/modes/p10"
QUERY = "delta200/global/query/modes/p10"
RADIAL = "delta200/global/q/radial_alignment/mean"
ROUTER = "router/global/entropy/mean"
LOAD = "router/global/max_violation/mean"
MARGIN = "router/global/margin/mean"
ENTROPY = "attention/global/entropy/mean"
SHARP = "attention/global/sharp_heads/mean"
LOGIT = "attention/global/max_logit/max"
RANK = "activations/global/rank_ratio/min"

# {key: (level, relative noise, steps between samples)}, as in small clean runs.
CLEAN = {
    LOSS: (2.5, 0.05, 10),
    GRADIENT: (1.2, 0.15, 10),
    UPDATE: (0.1, 0.05, 10),
    DELTA2: (9.0, 0.05, 25),
    QUERY: (8.0, 0.05, 25),
    RADIAL: (-0.12, 0.1, 25),
    ROUTER: (1.86, 0.01, 10),
    LOAD: (0.6, 0.1, 10),
    MARGIN: (0.2, 0.05, 10),
    ENTROPY: (1.9, 0.04, 50),
    SHARP: (0.05, 0.2, 50),
    LOGIT: (12.0, 0.1, 50),
    RANK: (0.62, 0.02, 50),
}


def stream(seed, steps, onset=None, factors=None, dense=False, first=0):
    """(step, values) of a clean run, in which from `onset` on keys go by a factor of their own.

    A factor may be a function of the steps since the onset. The loss falls slowly. The noise of a
    step does not depend on where the stream began.
    """
    for step in range(-(-first // 5) * 5, steps, 5):
        if step % 10 and step % 25:
            continue
        rng = np.random.default_rng((seed, step))
        values = {}
        for key, (level, noise, every) in CLEAN.items():
            x = level * (1 + noise * rng.normal())
            if step % every or (dense and key.startswith("router/")):
                continue
            if key == LOSS:
                x *= 0.7 + 0.3 * np.exp(-step / 3000)
            if factors and key in factors and step >= onset:
                factor = factors[key]
                x *= factor(step - onset) if callable(factor) else factor
            values[key] = float(x)
        if values:
            values["delta200/global/delta2/modes/worst_layer"] = 3.0
            values["delta200/global/delta2/modes/worst_head"] = 1.0
            values["symptoms/global/nonfinite/value"] = 0.0
            yield step, values
