"""`quick_jit`: jit for tests, whose time is nearly all compilation.

The compiler is told not to try hard; what a program computes stays the same up to rounding. Not for
tests that compare bits.
"""

from functools import partial

import jax

quick_jit = partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
