"""What makes a sample unique in a run."""

Key = tuple[str, int, str, int]  # question id, turn, method label, repeat
KEY = ("question_id", "turn", "method", "repeat")  # its parts, as columns
