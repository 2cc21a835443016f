"""Wire dialects: client JSON in, canonical messages out, and replies back in the same wire."""
