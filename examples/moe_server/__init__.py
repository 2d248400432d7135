"""An expert-parallel toy model behind HTTP, whose experts move while it answers."""
