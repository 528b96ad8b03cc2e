"""specbench_ss: which speculative-decoding method pays on your model, prompts and hardware, and why."""

__version__ = "0.1.0"
