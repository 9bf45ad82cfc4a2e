"""The suite of `make test-faults`: launched trainings to which something happens."""
