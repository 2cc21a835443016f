"""Starting harnesses: single recordings and task runs."""
