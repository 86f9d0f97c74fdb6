"""Models of which some layers have a window: rows that no row can see are freed."""
