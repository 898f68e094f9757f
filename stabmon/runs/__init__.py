"""The folder of a run: written, read and followed."""
