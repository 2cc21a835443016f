"""Tree attention: one operator, several backends."""
