"""``tidegate demo``: the main job once, from zero to zero, checked."""
