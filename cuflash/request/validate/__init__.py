"""Checks of the user's arguments, here alone: a module a call or subject."""
