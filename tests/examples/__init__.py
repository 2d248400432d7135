"""Examples that are more than a page."""
