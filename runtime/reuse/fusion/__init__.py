"""Documents anywhere in a prompt: chunks that were encoded alone, and a few of their rows computed again."""
