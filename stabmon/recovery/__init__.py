"""What is done about a fault: the ladder, checkpoint health, and the watcher of a run."""
