"""The optimizer's step over all parameters of a group in one call: form, C code, tuning, routing."""
