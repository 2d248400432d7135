"""Settings: every number and switch, from code or environment, refused by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from eplb_async.settings import Settings


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


def test_refuses_an_unknown_variable_by_name() -> None:
    """A variable that names no setting is refused, and the known ones are listed."""
    with pytest.raises(ValueError, match=r"EPLB_ASYNC_IDEL_TICK names no setting; known: .*idle_tick"):
        Settings.from_env({"EPLB_ASYNC_IDEL_TICK": "1"})


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
    with pytest.raises(ValueError, match=f"{variable}='{text}' is not a"):
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


def test_every_setting_is_documented() -> None:
    """Each setting has a line in the docstring."""
    for field in fields(Settings):
        assert f"{field.name}: " in (Settings.__doc__ or "")
