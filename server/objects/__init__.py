"""Objects that clients store: documents and schemas, their KV computed before a prompt reads it, and their routes."""
