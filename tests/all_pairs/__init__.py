"""The suite of `make test-all`: few projects, all pairs of answers, used as people use them."""
