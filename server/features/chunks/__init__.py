"""Documents and prompt modules: stored for clients, in requests, and on the command line."""
