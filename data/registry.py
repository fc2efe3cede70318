"""Knows every source of images by its name, what ``--data_source`` chooses from.

A new source is a file beside this one, with a function from ``Wanted`` to ``DataSource``, and a
line here. Imports nothing, so that ``--help`` stays fast.
"""

OPENED_BY = {
    "folder": "data.image_folder:open_folder",
    "webdataset": "data.webdataset:open_shards",
    "fake": "data.fake:FakeSource",
    "digits": "data.digits:open_digits",
    "mnist": "data.mnist:open_mnist",
    "volumes": "data.volumes:open_volumes",
    "mosaics": "data.mosaics:open_mosaics",
    "parquet": "data.parquet:open_parquet",
    "huggingface": "data.huggingface:open_huggingface",
}
"""Where the function of each is; imported when it is chosen: some need packages of their own."""

GIVE_FLOATS = ("volumes", "mosaics")
"""Sources that give fp32 values, normalised: any numbers, or those between two grey levels."""

NOT_AUGMENTED = (*GIVE_FLOATS, "fake")
"""Sources whose images get none of timm's augmentations of one image: those are for photographs."""
ALWAYS_ALIKE = ("mosaics", "fake")
"""Sources that give the same image each time, so that repeating it in a batch is of no use."""
