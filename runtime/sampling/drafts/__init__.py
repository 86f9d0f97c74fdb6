"""Drafts: tokens that may follow, found in earlier texts and verified with the token that is known."""
