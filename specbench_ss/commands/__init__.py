"""The commands of `ssbench`, one in each file. A command imports what it needs when it is called."""
