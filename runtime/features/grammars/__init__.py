"""Outputs that follow a JSON schema, an expression or a grammar."""
