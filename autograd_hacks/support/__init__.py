"""General helpers that all other folders may use."""
