"""The training loop, the faults it can inject, and one file per question.

On a CPU, LAPACK runs inside the training step beside XLA's own threads. OpenBLAS threads that spin
while they wait for each other then make a sampled step take ten times as long as another (measured:
150 ms where one thread takes 12 ms). So one thread is the default here, set before JAX is loaded;
OPENBLAS_NUM_THREADS overrides it.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
