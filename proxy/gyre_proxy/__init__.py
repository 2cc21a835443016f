"""Recording proxy between agent harnesses and inference engines. Speaks HTTP to engines; never imports gyre_train."""
