"""Public-domain text that ships with the package; SOURCES.md says what it is."""
