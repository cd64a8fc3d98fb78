"""The run-time type checker of the tests: an int passes for a float, as it does everywhere."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
