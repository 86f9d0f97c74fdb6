"""Drafts: likely next tokens from earlier text, verified in the same step as the known token."""
