"""Commands: parse, call, print. Results go to stdout, everything else to stderr."""
