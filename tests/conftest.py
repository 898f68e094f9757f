"""Settings under which every test runs: eight CPU devices, no silent rank promotion.

Set at import, before any test module touches a JAX backend.
"""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
