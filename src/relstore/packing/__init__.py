"""Packing: finds what may go, lists it, removes it; and everything else that reads a whole database."""
