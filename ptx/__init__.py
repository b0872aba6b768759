"""Runs compiled GPU kernels on the CPU, instruction by instruction, from the PTX that Triton's compiler made."""
