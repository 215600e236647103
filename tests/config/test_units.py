import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.units import (
    Amount,
    format_bytes,
    format_count,
    format_seconds,
    parse_amount,
    parse_duration,
    parse_size,
    size_above,
    size_below,
    typed_seconds,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("512M", 512 * 2**20),
        ("6G", 6 * 2**30),
        ("6g", 6 * 2**30),
        ("6 GiB", 6 * 2**30),
        ("6GB", 6 * 2**30),
        ("1.5T", 3 * 2**39),
        ("0", 0),
    ],
)
def test_sizes_are_powers_of_1024(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "6X", "6G7", "1e9", "nan", "90%"])
def test_what_is_not_a_size_is_refused_with_examples(text):
    with pytest.raises(ValueError, match="6G"):
        parse_size(text)


def test_an_amount_is_bytes_or_a_share():
    assert parse_amount("2G").of(100) == 2 * 2**30
    assert parse_amount("90%").of(1000) == 900
    assert str(parse_amount("90%")) == "90%"
    assert str(Amount(bytes=6 * 2**30)) == "6.00 GiB"


@pytest.mark.parametrize("text", ["0%", "101%", "%", "ten%"])
def test_a_share_outside_0_to_100_percent_is_refused(text):
    with pytest.raises(ValueError, match="percentage"):
        parse_amount(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("5s", 5), ("5", 5), ("2m", 120), ("1.5h", 5400)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "5 days", "inf"])
def test_what_is_not_a_duration_is_refused_with_examples(text):
    with pytest.raises(ValueError, match="50ms"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1.00 KiB"),
        (1024 * 1024 - 1, "1.00 MiB"),
        (61_300_000_000, "57.1 GiB"),
        (150 * 2**30, "150 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes_are_shown_with_three_digits(n, text):
    assert format_bytes(n) == text


@given(st.integers(0, 2**60))
def test_what_is_shown_can_be_typed_and_is_within_one_percent(n):
    assert parse_size(format_bytes(n)) == pytest.approx(n, rel=0.01)


def test_counts_and_seconds_read_well():
    assert format_count(18432) == "18,432"
    assert format_seconds(0.05) == "50 ms"
    assert format_seconds(3.21) == "3.21 s"
    assert format_seconds(125) == "2 min 5 s"
    assert format_seconds(3660) == "1 h 1 min"


@given(
    st.floats(0.001, 1e5).map(lambda s: float(f"{s:.4g}")) | st.sampled_from([0, 100, 120, 7200])
)
def test_a_typed_duration_is_read_back(s):
    assert parse_duration(typed_seconds(s)) == pytest.approx(s)


def test_durations_are_typed_in_the_largest_whole_unit():
    assert [typed_seconds(s) for s in (0.05, 5.0, 100.0, 120.0, 3600.0)] == [
        *("50ms", "5s", "100s", "2m", "1h")
    ]


@given(st.integers(1, 2**50))
def test_short_sizes_stay_on_their_side(n):
    below, above = parse_size(size_below(n)), parse_size(size_above(n))
    assert below <= n <= above
    assert below >= n * 0.9 and above <= n * 1.12
    assert len(size_below(n)) <= 6 or n < 10 * 1024 or n >= 10 * 2**40


def test_short_sizes_read_well():
    assert (size_below(22_939_802_870), size_above(22_939_802_870)) == ("21G", "22G")
    assert (size_below(5 * 2**30), size_above(6 * 2**20)) == ("5120M", "6144K")
