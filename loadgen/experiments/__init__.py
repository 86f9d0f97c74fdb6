"""Benches of Ramet's own parts, accuracy, GPUs and fleets. They are in the repository, and in no wheel."""
