"""Faults on purpose: processes killed, disks filled, files damaged, clocks set, many scripts at once on one store."""
