"""What all trainers share."""
