"""Drafter families: one file each, behind the calls of `base.Drafter`."""
