"""Lines as trainers print them: step, loss, gradient norm, rate and held-out loss are found."""

import math

import pytest

from stabmon.quantities import GRAD_NORM, HELD_OUT, LEARNING_RATE, LOSS
from stabmon.runs.foreign.load import load

MEGATRON = """\
using world size: 8, data-parallel size: 8
 [2024-01-01 00:00:0{n}] iteration {step:8d}/  500000 | consumed samples: {n:12d} | elapsed time \
per iteration (ms): 1234.5 | learning rate: 1.000E-0{n} | global batch size:   256 | \
lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {norm:.3f} | num zeros: 0.0 | \
number of skipped iterations:   0 | number of nan iterations:   0 |
"""
MEGATRON_EVAL = """\
------------------------------------------------------------------
 validation loss at iteration {step} on validation set | lm loss value: {held:.6E} | 
------------------------------------------------------------------
 validation loss at iteration {step} on test set | lm loss value: 7.7E+00 | lm loss PPL: 9.9E+00 |
  successfully saved checkpoint at iteration    {step} to /checkpoints
"""
DEEPSPEED = """\
[2023-01-01 10:00:0{n},123] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped=0, \
lr=[1e-0{n}], mom=[(0.9, 0.95)]
steps: {step} loss: {loss:.4f} iter time (s): 0.512 samples/sec: 100.200
"""
MAXTEXT = """\
I0804 08:20:00.0 1 metric_logger.py:210] completed step: {step}, seconds: 0.512, TFLOP/s/device: \
12.3, Tokens/s/device: 3000.1, total_weights: 8192, loss: {loss:.3f}
"""
MAXTEXT_EVAL = "eval metrics after step: {step}, loss={held:.3f}, total_weights=8751\n"
LLM_C = """\
step {step:4d}/19560 | loss {loss:.6f} (+nanz)| norm {norm:.4f} (+nanz)| lr 1.00e-0{n} | \
2000.00 ms | -100.0% bf16 MFU | 262,144 tok/s
"""
NANO_GPT = "iter {step}: loss {loss:.4f}, time 10.00ms, mfu -100.00%\n"
NANO_GPT_EVAL = "step {step}: train loss 9.9000, val loss {held:.4f}\n"
TORCHTITAN = """\
[rank0]:[titan] 2024-10-10 10:10:1{n},123 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: \
{loss:7.4f}  \x1b[34mgrad_norm: {norm:7.4f}  \x1b[33mmemory:  1.50GiB(1.6%)  tps: 3,000\x1b[39m
"""
SPEEDRUN = "step:{step}/6200 train_loss:{loss:.4f} train_time:74701ms step_avg:nanms\n"
SPEEDRUN_EVAL = "step:{step}/6200 val_loss:{held:.4f} train_time:74701ms step_avg:12.1ms\n"

KINDS = {
    "Megatron log": (MEGATRON, MEGATRON_EVAL, {LOSS, GRAD_NORM, LEARNING_RATE, HELD_OUT}, True),
    "DeepSpeed log": (DEEPSPEED, "", {LOSS, LEARNING_RATE}, None),
    "MaxText log": (MAXTEXT, MAXTEXT_EVAL, {LOSS, HELD_OUT}, False),
}
TEXTS = {
    "llm.c": (LLM_C, "val loss {held:.6f}\n", {LOSS, GRAD_NORM, LEARNING_RATE, HELD_OUT}, None),
    "nanoGPT": (NANO_GPT, NANO_GPT_EVAL, {LOSS, HELD_OUT}, None),
    "torchtitan": (TORCHTITAN, "", {LOSS, GRAD_NORM}, None),
    "speedrun": (SPEEDRUN, SPEEDRUN_EVAL, {LOSS, HELD_OUT}, None),
}


@pytest.mark.parametrize("name", [*KINDS, *TEXTS])
def test_what_a_trainer_prints_is_read(tmp_path, name):
    row, evaluation, keys, means = (KINDS | TEXTS)[name]
    path = tmp_path / "train.log"
    text = ""
    for n in range(1, 9):
        values = {"n": n, "step": 10 * n, "loss": 9 - n / 2, "norm": n / 4, "held": 5 + n / 8}
        text += row.format(**values)
        text += evaluation.format(**values) if n % 4 == 0 else ""
    path.write_text(text)
    run = load(path)
    assert run.source.kind == (name if name in KINDS else "text log")
    assert run.source.means is means
    assert {x for x in run.metrics if x in (LOSS, GRAD_NORM, LEARNING_RATE, HELD_OUT)} == keys
    n = list(range(1, 9))
    expected = {
        LOSS: [9 - x / 2 for x in n],
        GRAD_NORM: [x / 4 for x in n],
        LEARNING_RATE: [float(f"1e-0{x}") for x in n],
        HELD_OUT: [5.5, 6.0],
    }
    for key in keys:
        steps, values = run.metrics[key]
        assert steps.tolist() == ([40, 80] if key == HELD_OUT else [10 * x for x in n])
        assert values.tolist() == pytest.approx(expected[key], rel=1e-3)


def test_losses_that_are_no_numbers_and_steps_in_thousands_are_read(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("step: 900 loss: 2.5\nStep: 1,000, loss: NaN\nstep: 1,100, loss: -inf\n")
    steps, values = load(path).metrics[LOSS]
    assert steps.tolist() == [900, 1000, 1100]
    assert math.isnan(values[1])
    assert values[2] == -math.inf


def test_prose_is_no_log(tmp_path):
    path = tmp_path / "README"
    path.write_text("# Run\nAt step 1,000 the loss: 2.5 was good.\nSee step 3.\n")
    with pytest.raises(ValueError, match=r"README is no log that is known: .* known are"):
        load(path)
