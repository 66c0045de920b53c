"""ethtool statistics: the kernel's layout, and no such device on this machine."""

from __future__ import annotations

import errno
import struct

import pytest

from vsrtune.host.ethtool import parse_statistics, statistics


def test_names_end_at_nul_and_values_are_64_bits() -> None:
    names = b"rx_received".ljust(32, b"\0") + b"a" * 32 + b"odd\xff \0junk".ljust(32, b"\0")
    values = struct.pack("=QQQ", 1, 2**64 - 1, 0)
    assert parse_statistics(names, values) == {
        "rx_received": 1,
        "a" * 32: 2**64 - 1,
        "odd\\xff": 0,
    }


@pytest.mark.parametrize("name", ["nosuchdevice", "a-name-that-is-too-long"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(OSError, match=name) as caught:
        statistics(name)
    assert caught.value.errno == errno.ENODEV


def test_the_loopback_device_has_none() -> None:
    assert statistics("lo") == {}
