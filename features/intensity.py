"""Checks of images of more than 8 bits and of several bands: ``--intensity``, ``--in_chans``."""

from __future__ import annotations

from data.config import OF_FILES
from training.config import RunConfig
from training.errors import UsageError
from training.feature import Feature

_IN_COLOR = "it is defined for gray and color images"


class IntensityWords(Feature):
    """``--intensity``, which ``data/intensity.py`` applies."""

    turned_on_by = ("--intensity",)

    def resolve_flags(self, config: RunConfig) -> RunConfig:
        from data.intensity import Intensity

        if "intensity" not in config.explicitly_set:
            return config
        typed, data = self.shown(config), config.data
        assert data.intensity is not None
        try:
            Intensity.parse(data.intensity)
        except ValueError as error:
            raise UsageError(f"{typed}: {error}") from None
        # auto is the default, which --print_config prints for any source.
        has_no_effect = data.data_source in ("fake", "digits", "mnist", "mosaics", "volumes")
        if has_no_effect and data.intensity != "auto":
            raise UsageError(
                f"{typed} has no effect with --data_source {data.data_source}: drop it"
            )
        return config


class Bands(Feature):
    """Files with neither 1 nor 3 bands."""

    turned_on_by = ("--in_chans [02456789]*", "--in_chans [13]?*")  # all but 1 and 3
    excludes = {
        **dict.fromkeys(("--aa", "--color_jitter"), _IN_COLOR),
        **dict.fromkeys(("--native_resolution", "--segment_probe", "--segment_probe_every"), ""),
    }

    def is_on(self, config: RunConfig) -> bool:
        return super().is_on(config) and config.data.data_source in OF_FILES
