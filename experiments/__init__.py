"""The training loop, the faults it can inject, and one file per question."""
