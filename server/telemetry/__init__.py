"""Prometheus metrics, and a journal of ended requests."""
