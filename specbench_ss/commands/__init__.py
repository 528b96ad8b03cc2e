"""The commands of `ssbench`, one a file. Each imports what it needs when it is called."""
