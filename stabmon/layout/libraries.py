"""Layouts of known libraries: names and axes, as the libraries make them.

The tables are `jax_libraries.py`, `maxtext.py`, `torch_libraries.py` and `torch_gpt.py`. How a
tree is matched to one of them, cut and composed is `find.py` and `layout.py`.

RoPE turns queries and keys after the projection, position by position, so no fixed matrix holds
it: all products here are of the weights before the rotation. Where a library keeps a part of its
own for RoPE (latent attention), that part is left out and the rest is the exact NoPE product.
Permutations of the columns within a head, by which libraries differ in their RoPE, change no
spectrum.
"""

from stabmon.layout.jax_libraries import JAX
from stabmon.layout.torch_gpt import GPT_KIN
from stabmon.layout.torch_libraries import LLAMA_KIN

LIBRARIES = (*JAX, *LLAMA_KIN, *GPT_KIN)
