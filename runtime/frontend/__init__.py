"""The runtime as the server's process sees it: text to tokens and back, limits, and the engine process. No torch."""
