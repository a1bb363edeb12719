"""Meshes of devices, and which axis of an array goes to which axis of the mesh."""
