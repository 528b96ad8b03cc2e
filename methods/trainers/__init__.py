"""What `ssbench train` can train. Light modules: options are shown without loading torch."""
