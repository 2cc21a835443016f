"""Other formats into a run, and a run into other formats. `gyre_data.import_sessions` is the door of the first half."""
