"""Reports: a finished run as something to read. They know the core; the core does not know them."""
