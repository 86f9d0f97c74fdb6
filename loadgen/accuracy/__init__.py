"""Accuracy of approximate reuse: tasks, the training of a model for them, tables."""
