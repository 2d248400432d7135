"""The benchmark: a migration beside the same bytes by other means, in one run; see ``docs/bench.md``."""
