"""Loading models and drafters, hashing weights, chat templates."""
