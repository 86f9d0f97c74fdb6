"""Prompts with documents: their tokens, and the method with which the engine reuses the documents' KV."""
