"""Settings: every number and switch, from code or environment, refused by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from eplb_async.service_settings import ServiceSettings
from eplb_async.settings import Settings
from eplb_async.settings_table import rows
from eplb_async.variables import OTHERS


def test_defaults_are_valid_and_frozen() -> None:
    """The defaults are accepted, and cannot be changed."""
    settings = Settings()
    with pytest.raises(FrozenInstanceError):
        settings.max_pause = 1.0  # type: ignore[misc]


def test_reads_every_kind_from_the_environment() -> None:
    """Numbers, switches, words and the secret come from ``EPLB_ASYNC_<NAME>``; other variables do not matter."""
    settings = Settings.from_env(
        {
            "EPLB_ASYNC_MAX_POST_BYTES": "65536",
            "EPLB_ASYNC_IDLE_TICK": "0.25",
            "EPLB_ASYNC_PROGRESS_THREAD": "yes",
            "EPLB_ASYNC_USE_UVLOOP": "0",
            "EPLB_ASYNC_VERIFY": "off",
            "EPLB_ASYNC_SECRET": "a secret of this job",
            "UCX_TLS": "tcp",
        }
    )
    assert settings.max_post_bytes == 65536
    assert settings.idle_tick == 0.25
    assert settings.progress_thread is True
    assert settings.use_uvloop is False
    assert settings.verify == "off"
    assert settings.secret == b"a secret of this job"


def test_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the process's own environment is read."""
    monkeypatch.setenv("EPLB_ASYNC_READ_TIMEOUT", "7.5")
    assert Settings.from_env().read_timeout == 7.5


def test_overrides_win_over_variables() -> None:
    """What the caller gives wins over what the environment says."""
    assert Settings.from_env({"EPLB_ASYNC_IDLE_TICK": "0.25"}, idle_tick=0.5).idle_tick == 0.5


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("EPLB_ASYNC_IDEL_TICK", "EPLB_ASYNC_IDLE_TICK"),
        ("EPLB_ASYNC_idle_tick", "EPLB_ASYNC_IDLE_TICK"),
        ("EPLB_ASYNC_SECRETS", "EPLB_ASYNC_SECRET"),
        ("EPLB_ASYNC_SERVICE_MIN_GIAN", "EPLB_ASYNC_SERVICE_MIN_GAIN"),
        ("EPLB_ASYNC_SERVCE_BACKOFF", "EPLB_ASYNC_SERVICE_BACKOFF"),
        ("EPLB_ASYNC_VLMM", "EPLB_ASYNC_VLLM"),
    ],
)
def test_refuses_an_unknown_variable_by_name_and_says_which_was_meant(unknown: str, meant: str) -> None:
    """A variable that nobody reads is refused, also one that may be meant for the service or the plugin."""
    with pytest.raises(ValueError, match=f"^{unknown} names no setting; did you mean {meant}") as caught:
        Settings.from_env({unknown: "a secret, by a slip"})
    assert "a slip" not in str(caught.value)


def test_an_unknown_variable_like_no_other_is_refused_without_a_guess() -> None:
    """And the message says where all of them are."""
    with pytest.raises(ValueError, match=r"EPLB_ASYNC_X names no setting \(`eplb-async doctor --settings` lists all"):
        Settings.from_env({"EPLB_ASYNC_X": "1"})


def test_leaves_alone_what_others_read() -> None:
    """Variables with the prefix that are no settings, and those of the service, whatever their values."""
    service = {row.variable: "any" for row in rows() if row.record == "ServiceSettings"}
    assert len(service) > 5
    assert Settings.from_env(dict.fromkeys(OTHERS, "any") | service) == Settings()
    with pytest.raises(ValueError, match=r"EPLB_ASYNC_SERVICE_\w+='any' is not a whole number"):
        ServiceSettings.from_env(service)


def test_the_table_has_every_field_with_its_effect_and_what_it_may_be() -> None:
    """What a row says is allowed is: its bounds are accepted, and what lies beyond is refused."""
    table = rows()
    kinds = {"Settings": Settings, "ServiceSettings": ServiceSettings}
    assert [row.name for row in table] == [field.name for kind in kinds.values() for field in fields(kind)]
    assert [row.name for row in table if not (row.unit and row.allowed and row.effect.endswith("."))] == []
    for row in table:
        kind: Any = kinds[row.record]
        low, _, high = row.allowed.rpartition("or ")[2].partition(" to ")
        if not high or row.name.startswith("backoff"):
            continue
        for text in (low, high):
            assert getattr(kind.from_env({row.variable: text}), row.name) == float(text)
        with pytest.raises(ValueError, match=rf"setting {row.name}={int(high) + 1} is not "):
            kind(**{row.name: int(high) + 1})


def test_a_switch_is_no_word_and_no_number() -> None:
    """``"no"`` would be true."""
    for value in ("no", 1, None):
        with pytest.raises(ValueError, match=r"setting retry_reads=.* is not True or False"):
            Settings(retry_reads=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("EPLB_ASYNC_MAX_POST_BYTES", "6MiB"),
        ("EPLB_ASYNC_MAX_POST_BYTES", "1.5"),
        ("EPLB_ASYNC_IDLE_TICK", "soon"),
        ("EPLB_ASYNC_PROGRESS_THREAD", "maybe"),
    ],
)
def test_refuses_a_malformed_variable_by_name(variable: str, text: str) -> None:
    """A value of the wrong kind is refused, naming variable and value."""
    with pytest.raises(ValueError, match=f"{variable}='{text}' is not a (whole number|number|switch)"):
        Settings.from_env({variable: text})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_post_bytes", 1),
        ("max_post_bytes", 65536.0),
        ("max_requests_in_flight", 0),
        ("max_requests_in_flight", True),
        ("max_pause", 0),
        ("idle_tick", -1),
        ("read_timeout", float("nan")),
        ("read_timeout", float("inf")),
        ("staging_layers", -1),
        ("close_timeout", "5"),
    ],
)
def test_refuses_a_number_out_of_range_by_name(name: str, value: object) -> None:
    """A number of the wrong kind or out of range is refused, naming setting, value and range."""
    with pytest.raises(ValueError, match=rf"setting {name}=.* is not a .*number from .* to "):
        Settings(**{name: value})  # type: ignore[arg-type]


def test_refuses_an_unknown_mode_and_a_short_secret() -> None:
    """A word that is no mode and a secret that is too short or no bytes are refused."""
    with pytest.raises(ValueError, match="verify='both'"):
        Settings(verify="both")  # type: ignore[arg-type]
    for secret in (b"short", "a string, long enough"):
        with pytest.raises(ValueError, match="secret must be bytes, 16 or more") as caught:
            Settings(secret=secret)  # type: ignore[arg-type]
        assert str(secret) not in str(caught.value)


def test_never_shows_the_secret() -> None:
    """Neither ``repr`` nor an error message shows the secret."""
    settings = Settings(secret=b"sixteen bytes or more")
    assert "sixteen" not in repr(settings)
    with pytest.raises(ValueError, match="secret") as caught:
        Settings.from_env({"EPLB_ASYNC_SECRET": "tooshort"})
    assert "tooshort" not in str(caught.value)
