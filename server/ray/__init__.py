"""Replicas on a Ray cluster: `serve run server.ray.application:app`. The only room that needs ray."""
