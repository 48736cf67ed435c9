"""Which device a slot is: the user's list means what CUDA makes of it (C34)."""

from __future__ import annotations

import pytest

from goodrun.elastic_runner.devices.answers import Device
from goodrun.elastic_runner.devices.identity import bind

DEVICES = [Device(uuid=f"GPU-{letter * 8}-1111", name="H100", index=i) for i, letter in enumerate("abcdefgh")]
DEVICES[7] = Device(uuid="GPU-hhhhhhhh-1111", name="H100", index=7, instances=("MIG-one", "MIG-two"))


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [
        (None, list(range(8))),
        ("4,5,6,7", [4, 5, 6, 7]),
        (" 6 , 2", [6, 2]),
        ("GPU-cccccccc-1111,GPU-a", [2, 0]),
        ("gpu-CCCCCCCC", [2]),
        ("", []),
        ("-1", []),
        ("1,-1,2", [1]),
        ("1,12,2", [1]),
        ("GPU", []),  # the beginning of several
        ("3,3", []),
        ("3,GPU-d", []),  # one device under two names
        ("MIG-one,MIG-two", [7, 7]),
        ("MIG-one,MIG-one", []),
        ("MIG-GPU-hhhhhhhh-1111/1/0", [7]),
        ("MIG-three", []),
    ],
)
def test_a_list_means_what_cuda_makes_of_it(visible, indexes):
    """Numbers, UUIDs and their beginnings, MIG instances; cut at the first that is none; a device named twice makes none visible."""
    bound = bind({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, DEVICES)
    assert [b.index for b in bound] == indexes
    assert all(b.uuid == DEVICES[b.index].uuid for b in bound)


def test_the_users_own_words_are_kept():
    """Slots are named by UUID; a list that the user wrote keeps the user's words, so that a shrunken one is still his."""
    assert [b.name for b in bind({}, DEVICES[:2])] == [DEVICES[0].uuid, DEVICES[1].uuid]
    assert [b.name for b in bind({"CUDA_VISIBLE_DEVICES": "5,GPU-a"}, DEVICES)] == ["5", "GPU-a"]
