"""Where the images lie and what their labels are, in folders, tar shards, tables and arrays."""
