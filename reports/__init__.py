"""Reports turn a finished run into something to read. They know the core; the core does not know them."""
