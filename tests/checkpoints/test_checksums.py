"""Checksums go by their kind, and XXH3 is not needed to write."""

import zlib
from unittest import mock

import pytest

from lightning_megatron.checkpoints.files import checksums
from lightning_megatron.checkpoints.files.checksums import Checksum, checksum, kind_of

DATA = bytes(range(256)) * 5


@pytest.mark.parametrize("kind", ["xxh3", "crc32"])
def test_a_sum_of_parts_is_the_sum_of_the_whole_and_tells_a_flipped_bit(kind: str) -> None:
    parts, whole, other = Checksum(kind), Checksum(kind), Checksum(kind)
    for start in range(0, len(DATA), 100):
        parts.add(DATA[start : start + 100])
    whole.add(memoryview(DATA))
    other.add(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    assert str(parts) == str(whole) != str(other)
    assert kind_of(str(whole)) == kind


def test_crc32_is_what_others_call_crc32() -> None:
    total = Checksum("crc32")
    total.add(DATA)
    assert str(total) == f"crc32:{zlib.crc32(DATA):08x}"


def test_a_missing_package_is_named_where_its_sums_have_to_be_checked() -> None:
    written = checksum(DATA)
    assert kind_of(written) == "xxh3"
    with mock.patch.object(checksums, "xxhash", None), pytest.raises(RuntimeError, match="xxhash"):
        Checksum(kind_of(written))
    with pytest.raises(ValueError, match="'md5' are not known"):
        Checksum("md5")
