"""The runtime on Ray, the only package that imports ray."""
