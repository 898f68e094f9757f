"""Settings under which every test runs: eight CPU devices, no silent rank promotion.

Set at import, before any test module touches a JAX backend. One OpenBLAS thread, as in
`experiments`: its threads and XLA's get in each other's way. A cache of compiled programs for the
session, in the environment: processes that tests start find theirs there. Most of the suite's time
is compilation of programs that run once, so the backend is told not to optimise them.
"""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
