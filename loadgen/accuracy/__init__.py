"""What reuse costs in accuracy: tasks, a model of our own that can do them, tables."""
