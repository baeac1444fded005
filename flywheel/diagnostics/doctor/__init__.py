"""The doctor: whether an installation will work, and what it lacks. It looks and changes nothing.

Neither torch nor vLLM nor Ray is ever imported: versions are in the packages' metadata, GPUs are asked of the driver.
"""
