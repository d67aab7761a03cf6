"""The command ``kernelproof``: its faces, its reports, and what pipelines need."""
