"""Training drafters on a user's model and conversations; `data.py` is the text side."""
