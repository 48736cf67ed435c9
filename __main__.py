"""`python -m goodrun …`: goodrun with this interpreter, whatever PATH says."""

from .elastic_runner.cli import console

if __name__ == "__main__":
    console()
