"""Pure functions of arrays: jit-able, vmap-able, float32 out; no I/O, no parameter trees."""
