"""Host side: what is written to disk and shown to a person."""
