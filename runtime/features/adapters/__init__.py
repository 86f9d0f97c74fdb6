"""Low-rank adapters, which requests name as models."""
