"""Packing: finding out what may go, writing it down, removing it; and what looks at all of a database likewise."""
