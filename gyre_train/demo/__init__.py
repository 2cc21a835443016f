"""The demo: a small harness, its tasks, a teacher for the warm start, and the seven steps."""
