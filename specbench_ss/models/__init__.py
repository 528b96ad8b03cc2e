"""Loading models and drafters, hashing weights, and chat templates."""
