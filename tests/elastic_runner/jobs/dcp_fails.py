"""Torch's own dcp to and from TEST_CHECKPOINTS, which refuses it: the first failure's traceback is printed, the second ends the rank."""

import os
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from goodrun import ObjectStoreReader, ObjectStoreWriter

dist.init_process_group("gloo")
state = {"w": torch.ones(1000)}
place = os.environ["TEST_CHECKPOINTS"] + "-dcp"
try:
    dcp.save(state, storage_writer=ObjectStoreWriter(place))
except BaseException:  # dcp's own derives from it
    traceback.print_exc()
dcp.load(state, storage_reader=ObjectStoreReader(place))
