"""Doors into what people train with: notebooks, trainers, trackers. None is imported before it is asked for."""
