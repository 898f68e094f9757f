"""Settings under which every test runs: eight CPU devices, no silent rank promotion.

Set at import, before any test module touches a JAX backend. One OpenBLAS thread, as in
`experiments`: its threads and XLA's get in each other's way. Most of the suite's time is the
compilation of programs that run once. So the backend is told not to optimise them, and they are
kept in `.cache/xla` from one session to the next. The folder stands in the environment: workers and
processes that tests start use it too. `make clean` removes it.
"""

import os
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
)
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "xla")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
