"""Routes for operators, whose API keys are marked `admin`: the cache, the dashboard, metrics, control."""
