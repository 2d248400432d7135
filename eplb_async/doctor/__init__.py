"""``eplb-async doctor``: what a person needs to know of a machine before blaming the library.

Facts are gathered first: what can be read at once in this process (``host``), all that may hang or abort in a process
of its own with a deadline (``probes``, by ``child``). ``judges`` are pure: facts in, findings out. ``show`` prints.
"""
