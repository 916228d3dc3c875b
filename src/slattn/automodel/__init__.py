"""The modules of NVIDIA NeMo AutoModel that slattn can stand in for, under their own names."""
