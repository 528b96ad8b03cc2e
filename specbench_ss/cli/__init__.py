"""Commands of `ssbench`, one file each."""
