"""Accuracy of approximate reuse: tasks, benches, and profiles of models."""
