"""PLACEHOLDER by the lead so that the chain can be tried; the report room replaces this file."""
def write(): return None
