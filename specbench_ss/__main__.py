"""`python -m specbench_ss` is `ssbench`."""

from specbench_ss.cli import console

if __name__ == "__main__":
    console()
