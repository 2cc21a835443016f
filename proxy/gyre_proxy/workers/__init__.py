"""Several processes behind one port: a supervisor that owns the run, and workers that serve the calls."""
