"""CpuSet: the kernel's list and mask formats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", []),
        ("0", [0]),
        ("0-3,7", [0, 1, 2, 3, 7]),
        (" 2 , 0-1\n", [0, 1, 2]),
        ("0-7:1/4", [0, 4]),
        ("0-7:2/4", [0, 1, 4, 5]),
    ],
)
def test_parse(text: str, cpus: list[int]) -> None:
    assert list(CpuSet.parse(text)) == cpus


@pytest.mark.parametrize("text", ["x", "3-1", "0-", "-1", "1-2-3", "9000", "0-3:1/0", "٣"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(VsrtuneError):
        CpuSet.parse(text)


def test_mask() -> None:
    assert CpuSet.from_mask("00000001,00000003\n") == CpuSet([0, 1, 32])
    assert CpuSet.from_mask("0") == CpuSet()


@given(st.frozensets(st.integers(0, 300)))
def test_format_is_canonical(cpus: frozenset[int]) -> None:
    assert CpuSet.parse(str(CpuSet(cpus))) == CpuSet(cpus)


def test_algebra() -> None:
    a, b = CpuSet.parse("0-3"), CpuSet.parse("2-5")
    assert (str(a | b), str(a & b), str(a - b)) == ("0-5", "2-3", "0-1")
    assert CpuSet([1]) <= a and not a <= b and a.isdisjoint(CpuSet([9]))
    assert b.first() == 2 and 3 in a and len(a) == 4 and not CpuSet()


def test_mask_round_trip() -> None:
    for text in ("", "0", "1,3", "31", "32", "0,31-33,64", "127"):
        cpus = CpuSet.parse(text)
        assert CpuSet.from_mask(cpus.to_mask()) == cpus
    assert CpuSet().to_mask() == "0"
    assert CpuSet([0, 33]).to_mask() == "2,00000001"
    assert CpuSet([64]).to_mask() == "1,00000000,00000000"
