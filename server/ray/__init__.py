"""Replicas on a Ray cluster: `serve run server.ray.application:app`. Only this package imports ray."""
