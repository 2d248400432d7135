"""Settings of the service: by name, in range, from their own variables."""

from __future__ import annotations

import pytest

from eplb_async.service import ServiceSettings
from eplb_async.settings import Settings


def test_settings_come_from_their_own_variables() -> None:
    """And those of the communicator leave them alone."""
    environ = {
        "EPLB_ASYNC_SERVICE_STEP_INTERVAL": "500",
        "EPLB_ASYNC_SERVICE_MIN_GAIN": "0.1",
        "EPLB_ASYNC_VERIFY": "off",
    }
    chosen = ServiceSettings.from_env(environ, max_moves=7)
    assert (chosen.step_interval, chosen.min_gain, chosen.max_moves) == (500, 0.1, 7)
    assert Settings.from_env(environ).verify == "off"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"step_interval": -1}, "step_interval=-1 is not a whole number"),
        ({"window_steps": 0}, "window_steps=0"),
        ({"min_gain": "much"}, "min_gain='much' is not a number"),
        ({"max_moves": 1.5}, "max_moves=1.5 is not a whole number"),
        ({"round_timeout": True}, "round_timeout=True"),
        ({"min_interval": float("nan")}, "min_interval=nan"),
        ({"watch_interval": 0.01}, "watch_interval=0.01 is not 0, or a number from 0.05 to 3600"),
        ({"backoff": 10.0, "backoff_max": 5.0}, "backoff_max=5.0 is below backoff=10.0"),
    ],
)
def test_what_is_out_of_range_is_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServiceSettings(**values)  # type: ignore[arg-type]


def test_an_unknown_or_malformed_variable_is_an_error() -> None:
    with pytest.raises(ValueError, match="EPLB_ASYNC_SERVICE_STEPS names no service setting"):
        ServiceSettings.from_env({"EPLB_ASYNC_SERVICE_STEPS": "1"})
    with pytest.raises(ValueError, match="EPLB_ASYNC_SERVICE_MIN_GAIN='x' is not a number"):
        ServiceSettings.from_env({"EPLB_ASYNC_SERVICE_MIN_GAIN": "x"})
