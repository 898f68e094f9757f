"""Two made-up runs, one with a fault, shaped like those of a small GPT. No training behind them."""

import numpy as np
import pytest

from stabmon.runs.runlog import RunLog

ONSET, STEPS, EVERY = 300, 2400, 10


def _values(step, faulty, rng):
    """Values of one sample: what a fault at `ONSET` does, first to Δ2 and last to the loss."""
    gone = max(0.0, (step - ONSET) / 900) if faulty else 0.0
    noise = lambda scale: float(scale * rng.standard_normal())
    loss = 1.7 + 3.8 * np.exp(-step / 260) + max(0.0, gone - 1.4) ** 2 * 1.5 + noise(0.02)
    grad = 0.4 + 1.2 * np.exp(-step / 150) + 0.05 * np.expm1(2.4 * max(0.0, gone - 0.7))
    values = {
        "symptoms/global/loss/value": loss,
        "symptoms/global/grad_norm/value": grad * np.exp(noise(0.1)),
        "weights/global/q/stable_rank/mean": 9 - 2 * step / STEPS - 2.5 * max(0, gone - 1) ** 2,
    }
    heads = 8.0 + np.linspace(-1.2, 1.2, 16).reshape(4, 4)
    heads[2, 1] -= 4.5 * np.tanh(3 * gone)
    series = {
        "delta50/{}/delta2/modes": heads * (1 - 0.35 * np.tanh(2 * gone)),
        "delta50/{}/query/modes": 1.6 * heads * (1 - 0.25 * np.tanh(1.5 * gone)),
        "attention/{}/entropy": 2.4 + 0.1 * heads * np.exp(-max(0.0, gone - 0.9)),
        "attention/{}/max_logit": heads * (1 + step / STEPS) * np.exp(2 * max(0, gone - 0.8)),
    }
    for name, x in series.items():
        x = x + 0.08 * rng.standard_normal(x.shape)
        side = "max" if name.endswith("logit") else "min"
        worst = int(x.argmax() if side == "max" else x.argmin())
        statistics = {
            "mean": x.mean(),
            "p10": np.percentile(x, 10),
            "p90": np.percentile(x, 90),
            side: x.max() if side == "max" else x.min(),
            "worst_layer": worst // 4,
            "worst_head": worst % 4,
        }
        for aggregate, value in statistics.items():
            values[f"{name.format('global')}/{aggregate}"] = value
        for layer, row in enumerate(x):
            values[f"{name.format(f'layer_{layer:02d}')}/mean"] = row.mean()
    return values


@pytest.fixture(scope="session")
def demo_runs(tmp_path_factory):
    """Folders of a clean and a faulty run of one seed."""
    root = tmp_path_factory.mktemp("runs")
    return [write_run(root / name, faulty=name == "faulty") for name in ("clean", "faulty")]


def write_run(folder, *, faulty):
    """Writes one made-up run and returns its folder."""
    rng = np.random.default_rng(faulty)
    with RunLog.open(folder, {"seed": 0, "fault": faulty, "model": {"layers": 4}}) as log:
        if faulty:
            log.fault(kind="attention", onset=ONSET, end=None, bits_out=7)
        for step in range(0, STEPS + 1, EVERY):
            log.sample(step, _values(step, faulty, rng), tokens=768 * step)
        alarms = {
            "delta50/global/delta2/modes/mean": 680,
            "delta50/global/query/modes/p10": 720,
            "attention/global/entropy/mean": 1310,
            "symptoms/global/grad_norm/value": 1060,
            "symptoms/global/loss/value": 1780,
        }
        for key, step in alarms.items() if faulty else ():
            log.event("alarm", step, rule="robust_z", key=key, value=5.4, reference=7.9)
    return folder
