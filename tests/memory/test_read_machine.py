"""Machines drawn as files below a folder."""

from __future__ import annotations

import pytest

from ftd.memory.machine import processor_name, read_machine
from ftd.units import GiB, MiB


@pytest.fixture
def draw(tmp_path):
    """Write files, memory of 64 GiB with 40 GiB available among them, and read the machine."""

    def read(files: dict[str, str]):
        memory = "MemTotal:       67108864 kB\nMemFree:  100 kB\nMemAvailable:   41943040 kB\n"
        for name, text in ({"proc/meminfo": memory} | files).items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return read_machine(tmp_path)

    return read


def test_this_machine():
    machine = read_machine()
    assert machine.cores >= 1
    assert 0 < machine.available_bytes <= machine.total_bytes
    assert machine.numa_nodes


def test_a_processor_has_a_name(tmp_path):
    (tmp_path / "proc").mkdir()
    file = tmp_path / "proc" / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A fast one @ 2 GHz\nprocessor\t: 1\n")
    assert processor_name(tmp_path) == "A fast one @ 2 GHz"
    file.unlink()
    assert processor_name(tmp_path)


def test_without_cgroups_the_machine_is_the_limit(draw):
    machine = draw({})
    assert (machine.total_bytes, machine.available_bytes) == (64 * GiB, 40 * GiB)
    assert machine.limited_by == "the machine"
    assert machine.huge_pages == "unknown"


def test_the_tightest_limit_above_us_counts_in_cgroup_v2(draw):
    group = "sys/fs/cgroup/system.slice"
    machine = draw({
        "proc/self/cgroup": "0::/system.slice/ftd.service\n",
        f"{group}/ftd.service/memory.max": "max\n",
        f"{group}/ftd.service/memory.current": f"{1 * GiB}\n",
        f"{group}/memory.max": f"{16 * GiB}\n",
        f"{group}/memory.current": f"{6 * GiB}\n",
        f"{group}/memory.stat": f"anon 5\ninactive_file {2 * GiB}\nactive_file 7\n",
    })  # fmt: skip
    assert machine.total_bytes == 16 * GiB
    assert machine.available_bytes == 12 * GiB  # page cache of files read once does not count
    assert machine.limited_by.endswith("system.slice/memory.max")


def test_cgroup_v1_and_its_number_for_no_limit(draw):
    group = "sys/fs/cgroup/memory"
    machine = draw({
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n",
        f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{group}/memory.usage_in_bytes": "1000\n",
        f"{group}/a/b/memory.limit_in_bytes": f"{512 * MiB}\n",
        f"{group}/a/b/memory.usage_in_bytes": f"{500 * MiB}\n",
        f"{group}/a/b/memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MiB}\n",
    })  # fmt: skip
    assert machine.available_bytes == 112 * MiB
    assert machine.limited_by.endswith("a/b/memory.limit_in_bytes")


def test_a_container_that_sees_its_own_group_as_the_root(draw):
    machine = draw({
        "proc/self/cgroup": "0::/docker/0123\n",
        "sys/fs/cgroup/memory.max": f"{2 * GiB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GiB}\n",
    })  # fmt: skip
    assert machine.available_bytes == 0


def test_huge_pages(draw):
    file = "sys/kernel/mm/transparent_hugepage/enabled"
    assert draw({file: "always madvise [never]\n"}).huge_pages == "never"
