"""Monitors that see a language-model training run going wrong before its loss does."""
