"""Engine: the tests of this project; `pytest` runs them on a CPU."""
