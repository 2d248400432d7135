"""What may hang or abort the process that tries it; each function is run by ``child`` in one of its own."""
