"""How models write reasoning and calls of tools: a file for each form."""
