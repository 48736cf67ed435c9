"""Fails under torch's @record."""

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    raise ValueError("recorded")


main()
