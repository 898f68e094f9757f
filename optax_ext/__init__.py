"""Optax transforms: snapshots for the monitors and periodic matrix-sign restoration."""
