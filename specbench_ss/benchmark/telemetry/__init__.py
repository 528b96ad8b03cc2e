"""What the machine did while a sample was made: read by a thread, summed up between samples."""
