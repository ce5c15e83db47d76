"""Finds where the samples are in every call, and which calls give the rows of which parameter."""
