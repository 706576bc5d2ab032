"""Patches of upstream libraries. `registry` lists them all and applies them."""
