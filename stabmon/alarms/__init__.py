"""Host side, NumPy only: what turns numbers into decisions."""
