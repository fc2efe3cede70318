"""Runs in their steady state: nothing compiles, and each step is the same few executions."""

from itertools import pairwise

STEADY = "--max_steps 24 --warmup_steps 8 --log_step_interval 6 --num_workers 1".split()
READ_PER_LOG = 3
"""Loss, gradient norm, counts of skipped steps."""


def assert_steady_state(result, graphs, read_per_log=READ_PER_LOG):
    """Of a run with ``STEADY``, by the growth of its counters between logs after the warm-up."""

    def growth(name):
        values = [result.steps[step][name] for step in (6, 12, 18, 24)]
        return [after - before for before, after in pairwise(values)]

    assert growth("compilations") == [0, 0, 0]
    assert growth("executions") == [6 * graphs] * 3
    # Read when a later log is recorded; how many of the last log's is a matter of timing.
    assert abs(sum(growth("device_to_host")) - 3 * read_per_log) <= read_per_log
