"""The application: routes, limits, errors, streams."""
