"""Tree attention: one operator, several backends. Start at `gyre_train.attn.api`."""
