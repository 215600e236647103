import pytest

from ftd.engine.philox import philox4x32, uniform


def words(text):
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers published with Random123 (kat_vectors, philox4x32, 10 rounds)
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_published_vectors(counter, key, expected):
    assert philox4x32(words(counter), words(key)) == words(expected)


def test_uniform_uses_all_64_bits_of_seed_and_position():
    seeds = [0, 1, -1, 2**32, 2**63, 2**64 - 2, 2**32 - 1]
    positions = [0, 1, 2**32, 2**40]
    draws = {uniform(seed, position) for seed in seeds for position in positions}
    assert len(draws) == len(seeds) * len(positions)
    assert uniform(2**64 + 5, 3) == uniform(5, 3)
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def test_uniform_lies_between_0_and_1_and_is_even():
    draws = [uniform(7, position) for position in range(4000)]
    assert 0 < min(draws) < 0.01 and 0.99 < max(draws) < 1
    tenths = [sum(i <= 10 * u < i + 1 for u in draws) for i in range(10)]
    assert all(abs(n - 400) < 5 * 19 for n in tenths)  # five standard deviations
