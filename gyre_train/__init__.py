"""Training on trajectory trees with Megatron. Importing this package loads no torch; never imports gyre_proxy."""
