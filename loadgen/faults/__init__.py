"""Faults: bad clients, killed engines, signals, and long mixed load, each on a server of its own."""
