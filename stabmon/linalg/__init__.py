"""Decompositions and products of matrices, by platform: what the metrics are computed with."""
