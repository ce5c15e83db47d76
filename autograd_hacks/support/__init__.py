"""What everything may use and nothing else is about."""
