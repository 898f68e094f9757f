"""The triangular factor of a long thin matrix, which has its singular values.

A Cholesky-QR: the long axis is seen by Gram matrices only, so where it is sharded a pass costs one
small all-reduce. What is made of the factor is in `qk.py` and `activations.py`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from stabmon.linalg.decompositions import cholesky, cholesky_with_inverse, on_stack, turned
from stabmon.linalg.products import product


def triangular_factor(rows: Float[Array, "*stack n m"]) -> Float[Array, "*stack n n"]:
    """Upper-triangular R with RᵀR = AᵀA for A = `rows`ᵀ, safe for any scales and any rank.

    Cholesky-QR in two passes, each on unit columns of A and with a small diagonal shift. The unit
    columns make blocks of very different size (dW beside W) equally accurate; the shift lets the
    factorisation pass rank deficiency; and re-normalising between the passes turns what was left
    of a dependent column into a row of R of rounding size. Singular values of R X differ from
    those of A X by rounding times ‖A‖‖X‖. Zero matrix: zero. `rows` must be finite, with entries
    whose squares neither overflow nor underflow.

    Between the passes A is multiplied by an explicit inverse of the triangular factor, since a
    product is several times faster than a substitution. The residual grows with ‖|L⁻¹||L|‖ only,
    which no scaling of the columns changes: small however far the lengths are apart and whatever
    the rank.

    A lies transposed: a Gram matrix of rows runs along contiguous memory. Only these reduce over
    the long axis m.
    """

    def cosines(rows):
        gram = product(rows, turned(rows))
        lengths = jnp.sqrt(jnp.diagonal(gram, axis1=-2, axis2=-1))[..., None]
        safe = jnp.where(lengths > 0, lengths, jnp.ones_like(lengths))
        return lengths, safe, gram / (safe * turned(safe))

    lengths, safe, gram = cosines(rows)
    first, inverse = on_stack(cholesky_with_inverse)(gram)
    again, _, gram = cosines(product(inverse / turned(safe), rows))
    second = on_stack(cholesky)(gram)
    return product(turned(again * second), turned(lengths * first))
