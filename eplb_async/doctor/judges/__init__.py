"""Pure judges: facts in, findings out."""
