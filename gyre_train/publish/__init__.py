"""Ways of bringing new weights to engines."""
