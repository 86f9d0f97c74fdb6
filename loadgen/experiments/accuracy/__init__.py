"""Accuracy of approximate reuse: tasks and benches."""
