"""Settings under which every test runs: eight CPU devices, no silent rank promotion.

Set at import, before any test module touches a JAX backend. One OpenBLAS thread, as in
`experiments`: its threads and XLA's get in each other's way.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
