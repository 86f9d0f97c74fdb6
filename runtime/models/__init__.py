"""Models, their weights and their tokenizers."""
