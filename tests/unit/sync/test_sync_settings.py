import pytest
from pydantic import ValidationError

from triune.sync import SyncSettings


def test_the_defaults_are_strictly_on_policy():
    settings = SyncSettings()
    assert (settings.every, settings.max_staleness, settings.style) == (1, 0, "drain")


def test_the_channel_is_a_brick_and_a_wrong_field_is_named():
    assert SyncSettings.model_validate({"channel": {"use": "files", "keep": 5}}).channel.keep == 5
    with pytest.raises(ValidationError, match="did you mean 'keep'"):
        SyncSettings.model_validate({"channel": {"use": "memory", "keeep": 5}})
