"""Offline health of checkpoints: the monitor's measures, a layer at a time."""
