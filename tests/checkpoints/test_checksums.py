"""Checksums tell a flipped bit, and are stored with their kind."""

import pytest

from lightning_megatron.checkpoints.files.checksums import Checksum, check_kind, checksum

DATA = bytes(range(256)) * 5


def test_a_sum_of_parts_is_the_sum_of_the_whole_and_tells_a_flipped_bit() -> None:
    parts, whole, other = Checksum(), Checksum(), Checksum()
    for start in range(0, len(DATA), 100):
        parts.add(DATA[start : start + 100])
    whole.add(memoryview(DATA))
    other.add(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    assert str(parts) == str(whole) == checksum(DATA) != str(other)


def test_the_sum_is_xxh3_as_others_compute_it() -> None:
    assert checksum(b"") == "xxh3:2d06800538d394c2"


def test_a_sum_of_an_unknown_kind_is_refused_by_name() -> None:
    check_kind(checksum(DATA))
    with pytest.raises(ValueError, match="'crc32'; only 'xxh3'"):
        check_kind("crc32:8c736521")
