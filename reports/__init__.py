"""Reports turn a finished run into something to read. They import the core; the core does not import them."""
