"""A program of its own: starts libtpu as a run does, without a chip; libtpu ends it if it must."""

import os

import libtpu
from jaxlib import xla_client

path = os.environ.get("TPU_LIBRARY_PATH") or libtpu.get_library_path()
xla_client.load_pjrt_plugin_dynamically("tpu", path)
xla_client.initialize_pjrt_plugin("tpu")
