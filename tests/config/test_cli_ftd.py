import subprocess
import sys
from dataclasses import fields

import pytest
from click.testing import CliRunner

from ftd.cli import main
from ftd.config import flag, settings
from ftd.errors import BudgetExceeded
from ftd.kinds import FaultSpec


@pytest.fixture
def ftd(monkeypatch):
    """Run ``ftd`` with flags and a daemon that does what ``serve`` says."""

    def run(*flags, serve=lambda config: 0, env=None):
        monkeypatch.setattr("ftd.cli._serve", serve)
        return CliRunner().invoke(main, flags, env=env or {})

    return run


def test_help_shows_every_setting_and_its_default(ftd):
    text = ftd("--help").output
    for f in settings():
        assert flag(f.name) in text
    assert text.count("[default:") == len(settings())
    assert "127.0.0.1:1919" in text
    assert "[default: 100s]" in " ".join(text.split())


def test_help_names_every_fault(ftd):
    text = ftd("--help").output
    for f in fields(FaultSpec):
        assert f"({f.name.removesuffix('_s')}:" in text


def test_flags_reach_the_daemon_and_its_exit_code_is_ours(ftd):
    seen = []
    result = ftd(
        "--max-running", "3", "--served-name", "a", "--served-name", "b", "--log-prompts",
        serve=lambda config: seen.append(config) or 7,
        env={"FTD_MAX_WAITING": "5"},
    )  # fmt: skip
    assert result.exit_code == 7
    (config,) = seen
    assert (config.max_running, config.max_waiting) == (3, 5)
    assert config.served_name == ("a", "b")
    assert config.log_prompts is True


def test_a_wrong_setting_is_a_usage_error(ftd):
    result = ftd("--max-running", "none")
    assert result.exit_code == 2
    assert result.stderr.startswith("ftd: error: --max-running: expected a whole number")
    assert ftd("--no-such-flag").exit_code == 2
    both = ftd("--check", "--profile")
    assert both.exit_code == 2 and "give one of them" in both.stderr


def test_a_refusal_prints_error_and_hint_and_exits_1(ftd):
    def serve(config):
        raise BudgetExceeded("needs 2 GiB, 1 GiB is free", hint="lower --kv-tokens")

    result = ftd(serve=serve)
    assert result.exit_code == 1
    assert result.stderr == (
        "ftd: error: needs 2 GiB, 1 GiB is free\nftd: hint: lower --kv-tokens\n"
    )


def test_help_and_version_load_no_torch():
    code = (
        "import sys, ftd.cli, ftd.units\n"
        "try:\n ftd.cli.main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'aiohttp' not in sys.modules"
    )
    for argument in ("--help", "--version"):
        result = subprocess.run(
            [sys.executable, "-c", code, argument], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        assert "ftd" in result.stdout
