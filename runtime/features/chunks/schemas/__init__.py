"""Prompts that import modules of a schema (Prompt Cache): PML, its layout, and what a prompt sends to the engine."""
