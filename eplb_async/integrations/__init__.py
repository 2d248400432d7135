"""What fits this library into the servers of others; each module is loaded only when it is imported."""
