"""`gyre view`: a run as one page, served and followed live, or written as one self-contained file."""
