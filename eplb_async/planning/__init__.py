"""Plans to look at, from files: ``eplb-async plan``."""
