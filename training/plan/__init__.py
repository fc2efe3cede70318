"""Which hardware and which flags for a training: what every backend's ``--plan`` shares."""
