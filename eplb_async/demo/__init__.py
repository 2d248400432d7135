"""The demonstration: real rank processes, real NIXL, verified bytes."""
