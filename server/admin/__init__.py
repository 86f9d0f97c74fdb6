"""Routes for operators: the cache, the dashboard, metrics, control. Most need an admin's API key."""
