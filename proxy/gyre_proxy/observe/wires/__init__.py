"""The three wires as hosted APIs and their clients speak them: read tolerantly, refused never."""
