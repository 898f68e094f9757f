"""Where samples go besides the run's own folder."""
