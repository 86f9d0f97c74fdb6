"""The engine: the step, the scheduler and its queue, and the process around them."""
