"""Host side: what lies in a checkpoint on disk, read part by part. No JAX."""
