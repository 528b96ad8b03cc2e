"""`python -m specbench_ss` is `ssbench`."""

from specbench_ss.cli.main import console

if __name__ == "__main__":
    console()
