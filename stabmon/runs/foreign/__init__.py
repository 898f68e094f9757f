"""Other trainers' logs, read as runs."""
