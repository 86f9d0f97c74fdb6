"""The next turns of conversations, computed while the engine is idle."""
