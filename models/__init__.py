"""Decoder-only language models in Flax NNX with the hooks that the experiments need."""
