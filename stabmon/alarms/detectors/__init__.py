"""Detectors: each takes a stream of samples and raises alarms."""
