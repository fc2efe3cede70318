"""Faults put into real runs, again and again, and what each run then has to equal.

python -m benchmarks.faults        # or make faults
"""
