"""The vocabulary: frozen, serialisable, torch-free records that pass between stages."""
