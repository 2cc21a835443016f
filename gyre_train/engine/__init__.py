"""A small embedded engine with SGLang's native HTTP contract."""
