"""Measurements of the server: Prometheus metrics, and a journal of ended requests."""
